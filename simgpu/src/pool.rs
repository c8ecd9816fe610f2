//! The threads that run blocks.

use crate::ptx::exec::{Block, Env, Fault};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Instructions that a block runs before the next one gets its turn.
const QUANTUM: u32 = 1 << 17;

#[derive(Default)]
struct Progress {
    next: u64,
    done: u64,
    running: u32,
    parked: VecDeque<Block>,
    fault: Option<Fault>,
}

/// A grid on its way through the pool.
struct Run {
    env: Env,
    total: u64,
    resident: usize,
    stop: AtomicBool,
    progress: Mutex<Progress>,
    changed: Condvar,
}

impl Run {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.env.cancel.load(Ordering::Relaxed)
    }

    /// Returns a block to run, and whether there may be more.
    fn claim(&self) -> Option<(Block, bool)> {
        let mut p = self.progress.lock();
        if self.stopped() {
            self.changed.notify_all();
            return None;
        }
        let block = if p.next < self.total && p.parked.len() < self.resident {
            p.next += 1;
            let linear = p.next - 1;
            p.running += 1;
            let more = p.next < self.total || !p.parked.is_empty();
            drop(p);
            return Some((Block::new(&self.env, linear), more));
        } else {
            p.parked.pop_front()?
        };
        p.running += 1;
        Some((block, p.next < self.total || !p.parked.is_empty()))
    }

    fn finished(&self, p: &Progress) -> bool {
        p.done == self.total || (p.running == 0 && self.stopped())
    }
}

struct Pool {
    queue: Mutex<VecDeque<Arc<Run>>>,
    work: Condvar,
}

static POOL: OnceLock<Arc<Pool>> = OnceLock::new();

fn pool(threads: usize) -> &'static Arc<Pool> {
    POOL.get_or_init(|| {
        let pool = Arc::new(Pool { queue: Mutex::new(VecDeque::new()), work: Condvar::new() });
        let cpus = std::thread::available_parallelism().map_or(2, usize::from);
        for i in 0..if threads == 0 { cpus.clamp(2, 16) } else { threads } {
            let pool = pool.clone();
            // Without any thread the grid would wait for ever; a process that cannot start two
            // threads is out of resources.
            let _ = std::thread::Builder::new().name(format!("simgpu-sm{i}")).spawn(move || pool.serve());
        }
        pool
    })
}

impl Pool {
    fn push(&self, run: Arc<Run>) {
        self.queue.lock().push_back(run);
        self.work.notify_one();
    }

    fn serve(&self) {
        loop {
            let run = {
                let mut queue = self.queue.lock();
                loop {
                    match queue.pop_front() {
                        Some(run) => break run,
                        None => self.work.wait(&mut queue),
                    }
                }
            };
            let Some((mut block, more)) = run.claim() else { continue };
            if more {
                self.push(run.clone());
            }
            let piece = std::panic::AssertUnwindSafe(|| block.run(&run.env, QUANTUM));
            let result = std::panic::catch_unwind(piece).unwrap_or(Err(Fault::Trap));
            let mut p = run.progress.lock();
            p.running -= 1;
            match result {
                Ok(true) => p.done += 1,
                Ok(false) => {
                    p.parked.push_back(block);
                    drop(p);
                    self.push(run);
                    continue;
                }
                Err(fault) => {
                    p.fault.get_or_insert(fault);
                    run.stop.store(true, Ordering::Relaxed);
                }
            }
            if run.finished(&p) {
                run.changed.notify_all();
            }
        }
    }
}

/// Runs a grid until it completes or fails.
pub fn run(env: Env, threads: usize, resident: usize) -> Result<(), Fault> {
    let total = env.blocks();
    let run = Arc::new(Run {
        env,
        total,
        resident: resident.max(1),
        stop: AtomicBool::new(false),
        progress: Mutex::new(Progress::default()),
        changed: Condvar::new(),
    });
    let pool = pool(threads);
    pool.push(run.clone());
    let mut p = run.progress.lock();
    while !run.finished(&p) {
        // The timeout notices a cancellation while every block waits.
        run.changed.wait_for(&mut p, std::time::Duration::from_millis(50));
    }
    match p.fault {
        Some(fault) => Err(fault),
        None => Ok(()),
    }
}
