//! Runs the blocks of a grid.

use super::code::{Const, Program, Reduce};
use super::image::Image;
use super::sampler::Texture;
use super::warp::{Status, Warp};
use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// Errors of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    Illegal(u64),
    Misaligned(u64),
    Assert,
    Trap,
    BadPc,
}

/// A range of device addresses and the memory behind it.
#[derive(Debug, Clone)]
pub struct Span {
    pub start: u64,
    pub end: u64,
    pub host: usize,
    pub writable: bool,
    /// One bit per device that may access it.
    pub devices: u64,
}

/// All memory that kernels of one launch can access, sorted by address and kept alive by `keep`.
#[derive(Default)]
pub struct MemView {
    pub spans: Vec<Span>,
    pub keep: Vec<Arc<dyn Any + Send + Sync>>,
}

/// Textures and surfaces that kernels of one launch can use: by the number of the object, or by the
/// address of the variable that refers to it.
#[derive(Default)]
pub struct Images {
    pub textures: HashMap<u64, Arc<Texture>>,
    pub surfaces: HashMap<u64, Image>,
}

/// Services of the driver for device code.
pub trait Host: Send + Sync {
    fn print(&self, text: &[u8]);
    fn assertion(&self, text: &str);
    fn malloc(&self, size: u64) -> u64;
    fn free(&self, at: u64);
}

/// Values for each function's constant rows, in the address space of one context.
pub type Consts = Arc<Vec<Box<[u64]>>>;

/// Resolves the constants of a program with the addresses of its variables.
pub fn resolve_consts(program: &Program, vars: &[u64]) -> Consts {
    let value = |c: &Const| match c {
        Const::Imm(v) => *v,
        Const::Var { var, offset } => vars[*var as usize].wrapping_add(*offset as u64),
    };
    Arc::new(program.funcs.iter().map(|f| f.consts.iter().map(value).collect()).collect())
}

/// The inputs of one launch.
pub struct Env {
    pub program: Arc<Program>,
    pub consts: Consts,
    pub func: u32,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Parameter block in 8-byte words.
    pub params: Vec<u64>,
    pub dynamic_shared: u32,
    /// Address of zeroed memory for the barrier of a cooperative grid; 0 for other grids.
    pub workspace: u64,
    pub mem: Arc<MemView>,
    pub images: Arc<Images>,
    pub device: u32,
    pub sms: u32,
    pub grid_id: u64,
    pub started: Instant,
    pub host: Arc<dyn Host>,
    /// Set when the work is cancelled.
    pub cancel: Arc<AtomicBool>,
}

impl Env {
    pub fn blocks(&self) -> u64 {
        self.grid.iter().map(|&n| u64::from(n)).product()
    }
}

#[derive(Clone, Default)]
struct Barrier {
    arrived: u32,
    /// Number of threads; 0 means all threads of the block.
    expected: u32,
    sum: u32,
    op: Option<Reduce>,
}

/// State that the warps of a block share.
pub struct BlockState {
    pub ctaid: [u32; 3],
    pub linear: u64,
    pub live: u32,
    shared: Vec<u64>,
    shared_bytes: u64,
    barriers: Vec<Barrier>,
}

impl BlockState {
    pub fn arrive(&mut self, id: u8, count: u32, threads: u32, red: Option<(Reduce, u32)>) {
        let b = &mut self.barriers[usize::from(id)];
        b.arrived += threads;
        b.expected = count;
        if let Some((op, yes)) = red {
            b.sum += yes;
            b.op = Some(op);
        }
    }

    pub fn shared_ptr(&mut self, start: u64, end: u64) -> Option<*mut u8> {
        if end > self.shared_bytes {
            return None;
        }
        // SAFETY: `start <= end <= shared_bytes`, all inside `shared`.
        Some(unsafe { self.shared.as_mut_ptr().cast::<u8>().add(start as usize) })
    }
}

/// A block, which can run in pieces.
pub struct Block {
    warps: Vec<Warp>,
    state: BlockState,
}

impl Block {
    pub fn new(env: &Env, linear: u64) -> Block {
        let threads = env.block[0] * env.block[1] * env.block[2];
        let (gx, gy) = (u64::from(env.grid[0]), u64::from(env.grid[1]));
        let shared_bytes = u64::from(env.program.shared_total) + u64::from(env.dynamic_shared);
        let warps = (0..threads.div_ceil(32)).map(|w| Warp::new(env, w, threads - w * 32)).collect();
        Block {
            warps,
            state: BlockState {
                ctaid: [(linear % gx) as u32, (linear / gx % gy) as u32, (linear / gx / gy) as u32],
                linear,
                live: threads,
                shared: vec![0; shared_bytes.div_ceil(8) as usize],
                shared_bytes,
                barriers: vec![Barrier::default(); 16],
            },
        }
    }

    /// Runs every warp in turn for up to `budget` instructions; returns `true` when the block is
    /// done.
    pub fn run(&mut self, env: &Env, budget: u32) -> Result<bool, Fault> {
        let mut left = budget;
        while left > 0 {
            if env.cancel.load(Ordering::Relaxed) {
                return Ok(true);
            }
            let (mut running, mut done) = (false, true);
            for warp in &mut self.warps {
                if warp.done() {
                    continue;
                }
                let mut slice = 8192;
                let status = warp.run(env, &mut self.state, &mut slice)?;
                left = left.saturating_sub(8192 - slice);
                done &= status == Status::Done;
                running |= status == Status::Yield;
            }
            if done {
                return Ok(true);
            }
            if !self.release() && !running {
                // Every warp waits at a barrier that no thread will complete: a hang, as on a real
                // card.
                std::thread::sleep(std::time::Duration::from_micros(200));
                return Ok(false);
            }
        }
        Ok(false)
    }

    fn release(&mut self) -> bool {
        let mut any = false;
        for id in 0..self.state.barriers.len() {
            let live = self.state.live;
            let b = &mut self.state.barriers[id];
            let expected = if b.expected == 0 { live } else { b.expected };
            if b.arrived == 0 || b.arrived < expected {
                continue;
            }
            let result = match b.op {
                Some(Reduce::And) => u32::from(b.sum == b.arrived),
                Some(Reduce::Or) => u32::from(b.sum != 0),
                _ => b.sum,
            };
            *b = Barrier::default();
            any = true;
            for warp in &mut self.warps {
                warp.release(id as u8, result);
            }
        }
        any
    }
}

/// Returns a unique number for a grid.
pub fn next_grid_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

#[cfg(test)]
mod tests;
