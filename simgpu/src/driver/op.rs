//! Entries of a stream, which are also the nodes of a graph.

use crate::driver::array::ARRAYS;
use crate::driver::driver;
use crate::driver::module::Function;
use crate::driver::stream::Stream;
use crate::driver::texture;
use crate::errors::{self, Error, INVALID_VALUE, Result};
use crate::ipc::Counter;
use crate::memory::{Allocation, Piece};
use crate::pool;
use crate::ptx::exec::{Env, Fault, next_grid_id};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// One end of a copy.
#[derive(Clone)]
pub enum Place {
    /// An address that the driver knows: device, managed or pinned memory.
    Known(u64),
    /// Pageable memory of the program.
    Pageable(u64),
    /// Bytes taken from pageable memory when the copy was submitted.
    Staged(Arc<Vec<u8>>),
}

/// A box of rows at one end of a copy.
#[derive(Clone)]
pub struct Side {
    pub place: Place,
    /// Bytes from row to row; `slice` is from slice to slice.
    pub pitch: u64,
    pub slice: u64,
    /// Handle of the array to which the place belongs, or 0.
    pub array: usize,
}

impl Side {
    /// Refuses a place outside the array to which it is said to belong.
    fn check_array(&self) -> Result {
        let Place::Known(at) = self.place else { return Ok(()) };
        if self.array == 0 {
            return Ok(());
        }
        let image = ARRAYS.find(self.array).ok_or(INVALID_VALUE)?.image;
        let end = image.base.saturating_add(image.bytes().unwrap_or(0));
        let same =
            (image.base..=end).contains(&at) && (self.pitch == image.pitch || self.pitch == self.slice);
        if same { Ok(()) } else { Err(INVALID_VALUE) }
    }
}

#[derive(Clone)]
pub struct Copy {
    pub dst: Side,
    pub src: Side,
    pub width: u64,
    pub height: u64,
    pub depth: u64,
}

#[derive(Clone)]
pub struct Fill {
    pub at: u64,
    pub pitch: u64,
    pub value: u32,
    pub element: u32,
    /// Bytes per row.
    pub width: u64,
    pub height: u64,
}

#[derive(Clone)]
pub struct Launch {
    pub function: Arc<Function>,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub params: Vec<u64>,
    pub cooperative: bool,
    /// The function handle of the launch call; for a captured launch, the function itself.
    pub handle: usize,
    /// Whether the program passed its parameters as a buffer.
    pub buffered: bool,
}

#[derive(Clone)]
pub enum Op {
    Empty,
    Kernel(Arc<Launch>),
    Copy(Arc<Copy>),
    Fill(Fill),
    Host {
        func: usize,
        data: usize,
    },
    /// `cuStreamAddCallback`: the callback also gets the stream and its status.
    Callback {
        func: usize,
        data: usize,
        stream: usize,
    },
    Record(Arc<OnceLock<Instant>>),
    Wait {
        at: u64,
        value: u64,
        flags: u32,
        wide: bool,
    },
    Write {
        at: u64,
        value: u64,
        wide: bool,
    },
    /// Completes a record that other processes see; waits for one of another process.
    Complete(Arc<Counter>, u64),
    Await(Arc<Counter>, u64),
    Free(u64),
    Sequence(Arc<Vec<Op>>),
}

impl Op {
    pub fn run(&self, stream: &Arc<Stream>) -> Result {
        let writes = matches!(self, Op::Kernel(_) | Op::Copy(_) | Op::Fill(_) | Op::Write { .. });
        // Entries never wait for a thread that waits to move memory.
        let _moves = writes.then(|| crate::ipc::WRITING.read_recursive());
        match self {
            Op::Empty => Ok(()),
            Op::Kernel(launch) => launch.run(stream),
            Op::Copy(copy) => copy.run(),
            Op::Fill(fill) => fill.run(),
            Op::Host { func, data } => {
                let _inside = crate::driver::submit::in_callback();
                // SAFETY: the program gave this function for this purpose.
                unsafe { std::mem::transmute::<usize, unsafe extern "C" fn(usize)>(*func)(*data) };
                Ok(())
            }
            Op::Callback { func, data, stream: handle } => {
                let status = stream.life.check().err().map_or(0, |e| e.0);
                call_back(*func, *handle, status, *data);
                Ok(())
            }
            Op::Record(time) => {
                let _ = time.set(Instant::now());
                Ok(())
            }
            Op::Complete(counter, number) => {
                counter.complete(*number);
                Ok(())
            }
            Op::Await(counter, number) => {
                counter.wait(*number, || stream.life.over());
                Ok(())
            }
            Op::Wait { at, value, flags, wide } => wait_value(stream, *at, *value, *flags, *wide),
            Op::Write { at, value, wide } => {
                let piece = word(*at, *wide)?;
                std::sync::atomic::fence(Ordering::SeqCst);
                // SAFETY: `word` checked size and alignment.
                unsafe {
                    if *wide {
                        (*piece.ptr.cast::<AtomicU64>()).store(*value, Ordering::SeqCst);
                    } else {
                        (*piece.ptr.cast::<AtomicU32>()).store(*value as u32, Ordering::SeqCst);
                    }
                }
                Ok(())
            }
            Op::Free(at) => {
                driver()?.space.remove(*at, |_| true);
                Ok(())
            }
            Op::Sequence(ops) => {
                for op in ops.iter() {
                    if stream.life.over() {
                        op.abandon();
                    } else {
                        op.run(stream)?;
                    }
                }
                Ok(())
            }
        }
    }

    /// Runs in place of the entry if the context breaks before its turn.
    pub fn abandon(&self) {
        match self {
            Op::Record(time) => {
                let _ = time.set(Instant::now());
            }
            Op::Complete(counter, number) => counter.complete(*number),
            Op::Callback { func, data, stream } => call_back(*func, *stream, errors::LAUNCH_FAILED.0, *data),
            _ => {}
        }
    }
}

fn call_back(func: usize, stream: usize, status: u32, data: usize) {
    let _inside = crate::driver::submit::in_callback();
    // SAFETY: the program gave this function for this purpose.
    unsafe {
        std::mem::transmute::<usize, unsafe extern "C" fn(usize, u32, usize)>(func)(stream, status, data)
    };
}

fn word(at: u64, wide: bool) -> Result<Piece> {
    let size = if wide { 8 } else { 4 };
    if !at.is_multiple_of(size) {
        return Err(errors::MISALIGNED_ADDRESS);
    }
    driver()?.space.pieces(at, size)?.pop().ok_or(errors::ILLEGAL_ADDRESS)
}

fn wait_value(stream: &Arc<Stream>, at: u64, value: u64, flags: u32, wide: bool) -> Result {
    let piece = word(at, wide)?;
    let mut spins = 0u32;
    loop {
        // SAFETY: `word` checked size and alignment, and the piece keeps the memory.
        let now = unsafe {
            if wide {
                (*piece.ptr.cast::<AtomicU64>()).load(Ordering::SeqCst)
            } else {
                u64::from((*piece.ptr.cast::<AtomicU32>()).load(Ordering::SeqCst))
            }
        };
        let met = match flags & 3 {
            0 if wide => now.wrapping_sub(value) as i64 >= 0,
            0 => (now as u32).wrapping_sub(value as u32) as i32 >= 0,
            1 => now == value,
            2 => now & value != 0,
            _ => !(now | value) & if wide { u64::MAX } else { u64::from(u32::MAX) } != 0,
        };
        if met || stream.life.over() {
            return Ok(());
        }
        spins += 1;
        std::thread::sleep(std::time::Duration::from_micros(if spins < 100 { 10 } else { 200 }));
    }
}

impl Launch {
    fn run(&self, stream: &Arc<Stream>) -> Result {
        self.execute(stream).inspect_err(|_| stream.life.faulted(&self.function.name))
    }

    fn execute(&self, stream: &Arc<Stream>) -> Result {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let d = driver()?;
        let number = COUNT.fetch_add(1, Ordering::Relaxed) + 1;
        if d.config.fault_at_launch == number {
            d.space.report_xid(stream.device, 31);
            return Err(Error(d.config.fault_code));
        }
        // Machine code is not executed.
        let Some((program, func)) = &self.function.entry else { return Ok(()) };
        let workspace = match self.cooperative {
            true => Some(Workspace::new(stream)?),
            false => None,
        };
        let env = Env {
            workspace: workspace.as_ref().map_or(0, |w| w.0.base),
            program: program.clone(),
            consts: self.function.consts.clone(),
            func: *func,
            grid: self.grid,
            block: self.block,
            params: self.params.clone(),
            dynamic_shared: self.shared,
            mem: d.space.view(),
            images: if program.uses_images { texture::images() } else { Arc::default() },
            device: stream.device,
            sms: d.config.sms,
            grid_id: next_grid_id(),
            started: d.devices[stream.device as usize].started,
            host: stream.life.clone(),
            cancel: stream.life.cancel.clone(),
        };
        let resident =
            self.function.blocks_per_sm(self.block.iter().product(), u64::from(self.shared)) * d.config.sms;
        let device = env.device;
        pool::run(env, d.config.threads, resident as usize)
            .inspect_err(|fault| {
                // An MMU fault, or an exception of the graphics engine; a failed assertion is
                // neither.
                match fault {
                    Fault::Illegal(_) => d.space.report_xid(device, 31),
                    Fault::Misaligned(_) | Fault::Trap | Fault::BadPc => d.space.report_xid(device, 13),
                    Fault::Assert => {}
                }
            })
            .map_err(|fault| match fault {
                Fault::Illegal(_) => errors::ILLEGAL_ADDRESS,
                Fault::Misaligned(_) => errors::MISALIGNED_ADDRESS,
                Fault::Assert => errors::ASSERT,
                Fault::Trap => errors::LAUNCH_FAILED,
                Fault::BadPc => errors::INVALID_PC,
            })
    }
}

/// Memory of a cooperative grid, freed after the launch.
struct Workspace(Arc<Allocation>);

impl Workspace {
    fn new(stream: &Stream) -> Result<Workspace> {
        let a = driver()?.space.variable(stream.device, stream.context, 64)?;
        // SAFETY: the allocation has 64 bytes, and no other code has its address yet.
        unsafe {
            a.host_ptr().write_bytes(0, 64);
            a.host_ptr().cast::<u32>().write(64);
        }
        Ok(Workspace(a))
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        if let Ok(d) = driver() {
            d.space.remove(self.0.base, |a| a.id == self.0.id);
        }
    }
}

/// Returns the bytes of one row at one end.
fn row(side: &Side, y: u64, z: u64, width: u64) -> Result<Vec<(*mut u8, usize, Option<Piece>)>> {
    let offset = z * side.slice + y * side.pitch;
    Ok(match &side.place {
        Place::Known(at) => {
            driver()?.space.pieces(at + offset, width)?.into_iter().map(|p| (p.ptr, p.len, Some(p))).collect()
        }
        Place::Pageable(at) => vec![((at + offset) as *mut u8, width as usize, None)],
        Place::Staged(bytes) => {
            let start = offset as usize;
            let part = bytes.get(start..start + width as usize).ok_or(INVALID_VALUE)?;
            vec![(part.as_ptr().cast_mut(), part.len(), None)]
        }
    })
}

impl Copy {
    pub fn linear(dst: Place, src: Place, bytes: u64) -> Copy {
        let side = |place| Side { place, pitch: bytes, slice: bytes, array: 0 };
        Copy { dst: side(dst), src: side(src), width: bytes, height: 1, depth: 1 }
    }

    pub fn bytes(&self) -> u64 {
        self.width.saturating_mul(self.height).saturating_mul(self.depth)
    }

    /// Returns the bytes from the first to the last at one end.
    fn extent(&self, side: &Side) -> Result<u64> {
        if self.bytes() == 0 {
            return Ok(0);
        }
        let rows = (self.depth - 1).checked_mul(side.slice).zip((self.height - 1).checked_mul(side.pitch));
        rows.and_then(|(a, b)| a.checked_add(b)?.checked_add(self.width)).ok_or(INVALID_VALUE)
    }

    /// Refuses addresses that are not valid device, managed or pinned memory.
    pub fn validate(&self) -> Result {
        for side in [&self.dst, &self.src] {
            side.check_array()?;
            if let Place::Known(at) = side.place {
                driver()?.space.pieces(at, self.extent(side)?)?;
            }
        }
        Ok(())
    }

    /// Copies the source's bytes now, so that the program may change them.
    pub fn stage(&mut self) -> Result {
        let Place::Pageable(at) = self.src.place else { return Ok(()) };
        let len = self.extent(&self.src)? as usize;
        let mut bytes = vec![0u8; len];
        // SAFETY: the program vouches for its own memory.
        unsafe { std::ptr::copy_nonoverlapping(at as *const u8, bytes.as_mut_ptr(), len) };
        self.src.place = Place::Staged(Arc::new(bytes));
        Ok(())
    }

    fn run(&self) -> Result {
        if self.bytes() == 0 {
            return Ok(());
        }
        // A node may outlive its array, whose addresses can be those of other memory then.
        for side in [&self.dst, &self.src] {
            side.check_array().map_err(|_| errors::ILLEGAL_ADDRESS)?;
        }
        for z in 0..self.depth {
            for y in 0..self.height {
                let lost = |_| errors::ILLEGAL_ADDRESS;
                let dst = row(&self.dst, y, z, self.width).map_err(lost)?;
                let src = row(&self.src, y, z, self.width).map_err(lost)?;
                let (mut i, mut j, mut di, mut sj) = (0, 0, 0, 0);
                while i < dst.len() && j < src.len() {
                    let n = (dst[i].1 - di).min(src[j].1 - sj);
                    // SAFETY: both ends were looked up and are kept alive; the program vouches for
                    // pageable memory.
                    unsafe { std::ptr::copy(src[j].0.add(sj), dst[i].0.add(di), n) };
                    di += n;
                    sj += n;
                    if di == dst[i].1 {
                        (i, di) = (i + 1, 0);
                    }
                    if sj == src[j].1 {
                        (j, sj) = (j + 1, 0);
                    }
                }
            }
        }
        Ok(())
    }
}

impl Fill {
    pub fn validate(&self) -> Result {
        if self.width == 0 || self.height == 0 {
            return Ok(());
        }
        if !self.at.is_multiple_of(u64::from(self.element)) || (self.height > 1 && self.pitch < self.width) {
            return Err(INVALID_VALUE);
        }
        let extent = (self.height - 1)
            .checked_mul(self.pitch)
            .and_then(|n| n.checked_add(self.width))
            .ok_or(INVALID_VALUE)?;
        driver()?.space.pieces(self.at, extent).map(drop)
    }

    fn run(&self) -> Result {
        if self.width == 0 {
            return Ok(());
        }
        let pattern = self.value.to_le_bytes();
        for y in 0..self.height {
            let pieces = driver()?
                .space
                .pieces(self.at + y * self.pitch, self.width)
                .map_err(|_| errors::ILLEGAL_ADDRESS)?;
            for p in pieces {
                if self.element == 1 {
                    // SAFETY: the piece is kept alive.
                    unsafe { p.ptr.write_bytes(pattern[0], p.len) };
                    continue;
                }
                for at in (0..p.len).step_by(self.element as usize) {
                    // SAFETY: the piece is kept alive, and is a whole number of elements long.
                    unsafe {
                        std::ptr::copy_nonoverlapping(pattern.as_ptr(), p.ptr.add(at), self.element as usize)
                    };
                }
            }
        }
        Ok(())
    }
}
