//! A relay between programs and a server's data port that breaks their connections at random.
//!
//! It runs until its standard input ends, then prints what it did. The first connection of a
//! program is undisturbed until both ends know of each other: before that, a break means another
//! worker.
//!
//! A line on its standard input is a fault of all connections at once, and `done` answers it when
//! the fault begins: `reset`, `outage SECONDS`, `silence SECONDS`, `loss SECONDS`, `address`.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::Parser;
use gpusession_proto::preface::Preface;
use gpusession_test_support::altered::Altered;
use gpusession_test_support::relay::{Cut, Fate, FirstBytes, Place, Relay, With};

/// Preface, greeting, acknowledgement of its answer; or greeting's answer.
const GREETING_UNITS: u32 = 4;

#[derive(Parser)]
struct Arguments {
    /// Address at which programs look for the server.
    #[arg(long)]
    listen: SocketAddr,
    /// The server's data port.
    #[arg(long)]
    to: SocketAddr,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Frames that a connection has on average, in one direction; 0: no connection breaks at
    /// random.
    #[arg(long, default_value_t = 25)]
    units: u32,
    /// Frames to the worker of which one is changed on average; 0: none.
    #[arg(long, default_value_t = 0)]
    alter: u32,
    /// Changes frames to the program instead.
    #[arg(long)]
    down: bool,
}

/// Draws the fate of a connection.
fn fate(random: &mut fastrand::Rng, first: &FirstBytes, units: u32) -> (Fate, &'static str) {
    let greets = Preface::parse(first).is_ok_and(|preface| preface.lane.get() == 0 && !preface.resumes());
    if units == 0 {
        return (Fate::default(), "undisturbed");
    }
    let least = if greets { GREETING_UNITS } else { 0 };
    // One in four breaks at its beginning: in the preface, the handshake or the rest of the log.
    let unit = match random.u32(..4) {
        0 => random.u32(..6),
        _ => random.u32(..units * 2),
    };
    let place = Place::ALL[random.usize(..Place::ALL.len())];
    let cut = Some(Cut { unit: unit + least, place, reset: random.bool() });
    let time = Duration::from_millis(random.u64(20..400));
    let (with, name) = match random.u32(..100) {
        0 => (With::Outage(Duration::from_millis(random.u64(1000..3000))), "outages of 1 to 3 s"),
        1..=5 => (With::Outage(time), "outages below 0.4 s"),
        6..=15 => (With::Silence(time), "silences"),
        16..=30 => (With::HalfOpen(5 * time), "half open"),
        _ if cut.is_some_and(|cut| cut.reset) => (With::Notice, "resets"),
        _ => (With::Notice, "ends"),
    };
    match random.bool() {
        true => (Fate { up: cut, with, ..Fate::default() }, name),
        false => (Fate { down: cut, with, ..Fate::default() }, name),
    }
}

/// Executes a line of standard input.
fn execute(relay: &Relay, line: &str) -> Result<(), String> {
    let (word, time) = line.split_once(' ').unwrap_or((line, ""));
    let seconds = || match time.parse() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string()),
        Err(_) => Err(format!("{line}: no time in seconds")),
    };
    match word {
        "reset" => relay.cut(),
        "outage" => relay.outage(seconds()?),
        "silence" => relay.silence(seconds()?),
        "loss" => relay.loss(seconds()?),
        "address" => relay.change_address(),
        _ => return Err(format!("{line}: not a fault; reset, outage, silence, loss and address are")),
    }
    Ok(())
}

fn main() -> std::io::Result<()> {
    let Arguments { listen, to, seed, units, alter, down } = Arguments::parse();
    let random = Mutex::new(fastrand::Rng::with_seed(seed));
    let drawn = Arc::new(Mutex::new(BTreeMap::<&str, u32>::new()));
    let count = drawn.clone();
    let relay = Relay::serve(TcpListener::bind(listen)?, to, move |_, first| {
        let mut random = random.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut fate, name) = fate(&mut random, first, units);
        let greets = Preface::parse(first).is_ok_and(|preface| preface.lane.get() == 0);
        let from = if greets { GREETING_UNITS } else { 2 };
        let altered = (alter > 0).then(|| Altered { from, one_in: alter, seed: random.u64(..) });
        *(if down { &mut fate.altered_down } else { &mut fate.altered }) = altered;
        *count.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default() += 1;
        fate
    });
    println!("ready");
    for line in std::io::stdin().lines() {
        match execute(&relay, &line?) {
            Ok(()) => println!("done"),
            Err(why) => println!("faulty-relay: {why}"),
        }
    }
    if alter > 0 {
        println!("altered: {} frames of {} connections", relay.altered(), relay.connections());
        return Ok(());
    }
    let cuts = relay.cuts();
    let places: Vec<String> =
        Place::ALL.iter().zip(cuts).map(|(place, n)| format!("{n} {place:?}")).collect();
    let drawn = drawn.lock().unwrap_or_else(PoisonError::into_inner);
    let kinds: Vec<String> = drawn.iter().map(|(name, n)| format!("{n} {name}")).collect();
    println!(
        "faults: {} cuts of {} connections; by place: {}; drawn: {}",
        cuts.iter().sum::<usize>(),
        relay.connections(),
        places.join(", "),
        kinds.join(", ")
    );
    Ok(())
}
