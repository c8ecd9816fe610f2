//! Makes a program that fails smaller: removes steps while it still fails.

use crate::order::Order;
use crate::program::{Op, Program};
use anyhow::{Context, Result, ensure};
use std::collections::HashMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// How candidates run: each in a process of its own, since it may hang or crash.
pub struct Shrink {
    /// A program that runs first in the same process.
    pub before: Option<PathBuf>,
    /// How often a candidate runs until it counts as correct.
    pub repeat: u32,
    pub spin: u32,
}

impl Shrink {
    /// Returns the program with fewer steps, which still fails.
    pub fn run(&self, mut program: Program) -> Result<Program> {
        ensure!(self.fails(&program)?, "the program does not fail; nothing to shrink");
        let mut size = program.steps.len() / 2;
        while size > 0 {
            let mut from = 0;
            while from < program.steps.len() {
                let to = (from + size).min(program.steps.len());
                let candidate = without(&program, from..to);
                if Order::check(&candidate).is_ok() && self.fails(&candidate)? {
                    eprintln!("shrink: {} steps", candidate.steps.len());
                    program = candidate;
                } else {
                    from = to;
                }
            }
            size /= 2;
        }
        Ok(program)
    }

    fn fails(&self, program: &Program) -> Result<bool> {
        let file = std::env::temp_dir().join(format!("cuda-fuzz-{}.json", std::process::id()));
        std::fs::write(&file, serde_json::to_string(program)?)?;
        for _ in 0..self.repeat {
            let status = Command::new(std::env::current_exe()?)
                .args(["run", "--limit", "20", "--spin", &self.spin.to_string()])
                .args(&self.before)
                .arg(&file)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .context("cannot start the candidate")?;
            if !status.success() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Removes steps, and those that name what they made; renumbers the rest.
fn without(program: &Program, range: std::ops::Range<usize>) -> Program {
    let (mut steps, mut graphs) = (HashMap::new(), HashMap::new());
    let mut smaller = Program { steps: Vec::new(), ..program.clone() };
    for (number, step) in program.steps.iter().enumerate() {
        if range.contains(&number) {
            continue;
        }
        let mut step = step.clone();
        let renumbered = match &mut step.op {
            Op::Await(other) => steps.get(other).map(|new| *other = *new),
            Op::Define(graph, ..) => {
                let new = graphs.len();
                graphs.insert(*graph, new);
                *graph = new;
                Some(())
            }
            Op::Update(graph, _) | Op::Launch(graph, _) | Op::Destroy(graph) => {
                graphs.get(graph).map(|new| *graph = *new)
            }
            _ => Some(()),
        };
        if renumbered.is_some() {
            steps.insert(number, smaller.steps.len());
            smaller.steps.push(step);
        }
    }
    smaller
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate;

    #[test]
    fn steps_that_remain_name_the_same_steps_and_graphs() {
        let mut valid = 0;
        for seed in 0..200 {
            let program = generate::program(seed);
            let middle = program.steps.len() / 2;
            let smaller = without(&program, middle..middle + 1);
            assert!(smaller.steps.len() < program.steps.len());
            for (number, step) in smaller.steps.iter().enumerate() {
                if let Op::Await(other) = step.op {
                    assert!(other < number && smaller.steps[other].thread != step.thread, "seed {seed}");
                }
            }
            valid += u32::from(Order::check(&smaller).is_ok());
        }
        assert!(valid > 50, "most removals of one step leave a valid program: {valid} of 200");
    }
}
