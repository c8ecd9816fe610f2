//! Runs random CUDA programs whose results are known.

#![expect(clippy::disallowed_methods, reason = "threads and functions of a random program pause")]

mod driver;
mod generate;
mod oracle;
mod order;
mod program;
mod run;
mod shrink;

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, Subcommand};
use program::Program;
use run::{Device, Outcome};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Runs random CUDA programs whose results are known, on the driver that the loader finds.
#[derive(Parser)]
#[command(name = "cuda-fuzz")]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Runs the programs of seeds, or of files, and prints a line for each
    Run {
        /// Seeds, such as 1..1000 or 17
        #[arg(long, value_parser = seeds)]
        seeds: Option<std::ops::Range<u64>>,
        /// Stops after this many seconds
        #[arg(long)]
        seconds: Option<u64>,
        /// Factor of the loops that let kernels take time
        #[arg(long, default_value_t = 1)]
        spin: u32,
        /// Seconds after which a program counts as hanging
        #[arg(long, default_value_t = 60)]
        limit: u64,
        /// Prints only programs that fail, and a summary
        #[arg(long)]
        quiet: bool,
        /// Exits at the first failure of a valid call
        #[arg(long)]
        strict: bool,
        /// Programs that `show` or `shrink` wrote
        files: Vec<PathBuf>,
    },
    /// Prints the program of a seed as JSON
    Show { seed: u64 },
    /// Removes steps while the program still fails, and prints it as JSON
    Shrink {
        /// A seed, or a file
        program: String,
        /// A program that runs before it in the same process
        #[arg(long)]
        before: Option<PathBuf>,
        /// How often each candidate runs, for failures that do not always show
        #[arg(long, default_value_t = 3)]
        repeat: u32,
        /// Factor of the loops that let kernels take time
        #[arg(long, default_value_t = 1)]
        spin: u32,
    },
}

fn seeds(text: &str) -> Result<std::ops::Range<u64>, String> {
    let number = |text: &str| text.parse::<u64>().map_err(|error| format!("{text}: {error}"));
    match text.split_once("..") {
        Some((from, to)) => Ok(number(from)?..number(to)?),
        None => number(text).map(|seed| seed..seed + 1),
    }
}

fn read(name: &str) -> Result<Program> {
    if let Ok(seed) = name.parse() {
        return Ok(generate::program(seed));
    }
    let text = std::fs::read_to_string(name).with_context(|| format!("{name}: cannot be read"))?;
    let program: Program = serde_json::from_str(&text).with_context(|| format!("{name}: not a program"))?;
    if let Err((step, conflict)) = order::Order::check(&program) {
        bail!("{name}: step {step}: not valid: {conflict:?}");
    }
    Ok(program)
}

fn main() -> Result<()> {
    match Arguments::parse().verb {
        Verb::Run { seeds, seconds, spin, limit, quiet, strict, files } => {
            run::refused::STRICT.store(strict, Ordering::Relaxed);
            ensure!(seeds.is_some() || !files.is_empty(), "nothing to run: name --seeds or files");
            let device = Device::open(spin)?;
            watch(limit);
            let end = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
            let kept: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
            let seeds = seeds.unwrap_or(0..0).map(|seed| seed.to_string());
            let (mut programs, mut calls, mut bad) = (0u64, 0usize, 0u64);
            for name in kept.into_iter().chain(seeds) {
                if end.is_some_and(|end| Instant::now() > end) {
                    break;
                }
                let program = read(&name)?;
                SINCE.store(now(), Ordering::Relaxed);
                SEED.store(program.seed, Ordering::Relaxed);
                let outcome = device.run(&program);
                SINCE.store(0, Ordering::Relaxed);
                programs += 1;
                calls += outcome.calls;
                let fine = outcome.failed.is_empty() && outcome.wrong.is_empty();
                bad += u64::from(!fine);
                if !(quiet && fine) {
                    print(&name, &program, &outcome);
                }
                // After an error that breaks the context nothing works any more.
                if outcome.failed.iter().any(|(_, name, result)| *name == "cuCtxSynchronize" && *result != 0)
                {
                    println!("fuzz: stopped: the context is broken");
                    break;
                }
            }
            println!("fuzz: {programs} programs, {calls} calls, {bad} wrong");
            if bad > 0 {
                std::process::exit(1);
            }
        }
        Verb::Show { seed } => println!("{}", serde_json::to_string_pretty(&generate::program(seed))?),
        Verb::Shrink { program, before, repeat, spin } => {
            let program = shrink::Shrink { before, repeat, spin }.run(read(&program)?)?;
            println!("{}", serde_json::to_string_pretty(&program)?);
        }
    }
    Ok(())
}

fn print(name: &str, program: &Program, outcome: &Outcome) {
    let verdict = if outcome.wrong.is_empty() && outcome.failed.is_empty() { "ok" } else { "WRONG" };
    let refused: Vec<String> = outcome.refused.iter().map(|(_, _, result)| result.to_string()).collect();
    println!(
        "{name} {verdict} {:016x} steps {} calls {} refused [{}]",
        outcome.digest,
        program.steps.len(),
        outcome.calls,
        refused.join(" ")
    );
    for (step, call, result) in &outcome.failed {
        println!("    step {step}: {call}: {result}");
    }
    for wrong in &outcome.wrong {
        println!(
            "    buffer {} ({:?}, {} bytes): byte {} is {:#04x} instead of {:#04x}, {} bytes differ; last written by step {}",
            wrong.buffer,
            program.buffers[wrong.buffer].kind,
            program.buffers[wrong.buffer].size,
            wrong.byte,
            wrong.found,
            wrong.expected,
            wrong.count,
            wrong.writer.map_or("none".to_owned(), |step| format!("{step} ({:?})", program.steps[step].op)),
        );
    }
}

static SINCE: AtomicU64 = AtomicU64::new(0);
static SEED: AtomicU64 = AtomicU64::new(0);

fn now() -> u64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_millis() as u64 + 1
}

/// Ends the process if a program hangs.
fn watch(limit: u64) {
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_millis(200));
            let since = SINCE.load(Ordering::Relaxed);
            if since != 0 && now() > since + limit * 1000 {
                let at: Vec<u64> = run::CURRENT.iter().map(|at| at.load(Ordering::Relaxed)).collect();
                println!("{} HANGS: steps of the threads: {at:?}", SEED.load(Ordering::Relaxed));
                // SAFETY: ends the process at once, after the line is written. The driver's exit
                // handlers would wait for the work that hangs.
                unsafe { libc::_exit(3) };
            }
        }
    });
}
