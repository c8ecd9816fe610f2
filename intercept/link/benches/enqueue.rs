//! Cost of a kernel launch for a program's thread: encoding, the log's lock, waking the sender.
//!
//! The peer reads and discards all frames, as a worker does whose GPU keeps up. The second part
//! measures bursts, and counts the thread's system calls.
#![expect(clippy::disallowed_methods, reason = "a benchmark pauses between bursts")]
#![allow(missing_docs, reason = "criterion_group makes a public function")]

use std::process::Command;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group};
use gpusession_link::Link;
use gpusession_link::link::Caller;
use gpusession_proto::frame::op;
use gpusession_test_link::peer::link;

fn launch(link: &Link) {
    const CALLER: Caller = Caller { thread: 1, ctx: 1 };
    let posted = link.post(op::LAUNCH, CALLER, |w| {
        for word in 0..6 {
            w.word(word);
        }
        w.bytes(&[]);
        w.bytes(&[0; 64]);
    });
    posted.expect("the sink reads");
}

fn enqueue(c: &mut Criterion) {
    let link = link(None);
    c.bench_function("enqueue a launch with 64 bytes of parameters", |b| b.iter(|| launch(&link)));
}

/// Launches in bursts with pauses, as programs do; returns the nanoseconds of each launch.
fn bursts() -> Vec<u64> {
    let link = link(None);
    let mut times = Vec::with_capacity(100 * 1000);
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(2));
        gpusession_test_link::syscalls::mark();
        for _ in 0..1000 {
            let begun = Instant::now();
            launch(&link);
            times.push(begun.elapsed().as_nanos() as u64);
        }
        gpusession_test_link::syscalls::mark();
    }
    times
}

criterion_group!(benches, enqueue);

fn main() {
    const TRACED: &str = "traced";
    if std::env::args().any(|word| word == TRACED) {
        bursts();
        return;
    }
    benches();
    let mut again = Command::new(std::env::current_exe().expect("a program"));
    gpusession_test_link::syscalls::report(
        "enqueue a launch",
        &mut bursts(),
        gpusession_test_link::syscalls::count(again.arg(TRACED)),
    );
}
