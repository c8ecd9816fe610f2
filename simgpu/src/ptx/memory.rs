//! Memory access of a warp, and the functions that the driver provides to device code.

use super::ast::Ty;
use super::atomics::{fetch, put};
use super::code::{
    Addr, Builtin, CallSite, LOCAL_WINDOW, Mem, NONE, PARAM_WINDOW, SHARED_WINDOW, WINDOW_MASK,
};
use super::exec::{BlockState, Env, Fault};
use super::format;
use super::rows::lanes;
use super::special::thread_index;
use super::warp::{Frame, Warp};

impl Warp {
    pub(super) fn lane_ptr(&mut self, lane: usize) -> *mut u8 {
        self.memory[lane * (self.lane_bytes / 8)..].as_mut_ptr().cast()
    }

    pub(super) fn copy_lane(&mut self, mask: u32, from: u32, to: u32, size: u32) {
        debug_assert!((from.max(to) + size) as usize <= self.lane_bytes);
        lanes(mask, |l| {
            let p = self.lane_ptr(l);
            // SAFETY: both pieces lie inside frames for which `enter` allocated memory.
            unsafe { std::ptr::copy(p.add(from as usize), p.add(to as usize), size as usize) };
        });
    }

    /// Returns the host address of `size` bytes that lane `lane` accesses.
    #[allow(clippy::too_many_arguments)]
    #[inline]
    pub(super) fn resolve(
        &mut self,
        env: &Env,
        block: &mut BlockState,
        top: Frame,
        at: &Addr,
        lane: usize,
        size: u32,
        write: bool,
    ) -> Result<*mut u8, Fault> {
        let start = if at.base == NONE { 0 } else { self.regs[(top.regs + at.base) as usize][lane].get() };
        let mut addr = start.wrapping_add(at.offset as u64);
        if at.frame {
            addr = addr.wrapping_add(u64::from(top.mem));
        }
        self.locate(env, block, at.mem, addr, lane, size, write)
    }

    #[allow(clippy::too_many_arguments)]
    #[inline]
    pub(super) fn locate(
        &mut self,
        env: &Env,
        block: &mut BlockState,
        mem: Mem,
        addr: u64,
        lane: usize,
        size: u32,
        write: bool,
    ) -> Result<*mut u8, Fault> {
        if addr & u64::from(size.next_power_of_two() - 1) != 0 {
            return Err(Fault::Misaligned(addr));
        }
        let (mem, addr) = match mem {
            Mem::Generic => match addr & WINDOW_MASK {
                0 => (Mem::Global, addr),
                SHARED_WINDOW => (Mem::Shared, addr & !WINDOW_MASK),
                LOCAL_WINDOW => (Mem::Local, addr & !WINDOW_MASK),
                PARAM_WINDOW => (Mem::Param, addr & !WINDOW_MASK),
                _ => return Err(Fault::Illegal(addr)),
            },
            other => (other, addr),
        };
        let end = addr.checked_add(u64::from(size)).ok_or(Fault::Illegal(addr))?;
        match mem {
            Mem::Global | Mem::Generic => {
                let spans = &env.mem.spans;
                let hit = spans.get(self.last_span).is_some_and(|s| addr >= s.start && end <= s.end);
                if !hit {
                    let at = spans.partition_point(|s| s.start <= addr).wrapping_sub(1);
                    if spans.get(at).is_none_or(|s| end > s.end) {
                        return Err(Fault::Illegal(addr));
                    }
                    self.last_span = at;
                }
                let span = &spans[self.last_span];
                if span.devices & (1 << env.device) == 0 || (write && !span.writable) {
                    return Err(Fault::Illegal(addr));
                }
                Ok((span.host + (addr - span.start) as usize) as *mut u8)
            }
            Mem::Shared => block.shared_ptr(addr, end).ok_or(Fault::Illegal(SHARED_WINDOW | addr)),
            Mem::Local => {
                if end > self.lane_bytes as u64 {
                    return Err(Fault::Illegal(LOCAL_WINDOW | addr));
                }
                // SAFETY: `end` is within this lane's part of `memory`.
                Ok(unsafe { self.lane_ptr(lane).add(addr as usize) })
            }
            Mem::Param => {
                if end > env.params.len() as u64 * 8 || write {
                    return Err(Fault::Illegal(PARAM_WINDOW | addr));
                }
                // SAFETY: `end` is within the parameter block; it is only read.
                Ok(unsafe { env.params.as_ptr().cast::<u8>().cast_mut().add(addr as usize) })
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn load(
        &mut self,
        env: &Env,
        block: &mut BlockState,
        top: Frame,
        active: u32,
        d: &[u32; 4],
        n: u8,
        ty: Ty,
        at: &Addr,
    ) -> Result<(), Fault> {
        let size = ty.size();
        let mut rest = active;
        while rest != 0 {
            let l = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let p = self.resolve(env, block, top, at, l, size * u32::from(n), false)?;
            for (i, d) in d.iter().take(usize::from(n)).enumerate() {
                // SAFETY: `resolve` checked bounds and alignment of all `n` elements.
                let v = unsafe { fetch(p.add(i * size as usize), ty) };
                self.regs[(top.regs + d) as usize][l].set(v);
            }
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn store(
        &mut self,
        env: &Env,
        block: &mut BlockState,
        top: Frame,
        active: u32,
        s: &[u32; 4],
        n: u8,
        ty: Ty,
        at: &Addr,
    ) -> Result<(), Fault> {
        let size = ty.size();
        let mut rest = active;
        while rest != 0 {
            let l = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let p = self.resolve(env, block, top, at, l, size * u32::from(n), true)?;
            for (i, s) in s.iter().take(usize::from(n)).enumerate() {
                let v = self.regs[(top.regs + s) as usize][l].get();
                // SAFETY: `resolve` checked bounds and alignment of all `n` elements.
                unsafe { put(p.add(i * size as usize), size, v) };
            }
        }
        Ok(())
    }

    pub(super) fn builtin(
        &mut self,
        env: &Env,
        block: &mut BlockState,
        top: Frame,
        active: u32,
        which: Builtin,
        site: &CallSite,
    ) -> Result<(), Fault> {
        let mut rest = active;
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let mut args = [0u64; 5];
            for (value, slot) in args.iter_mut().zip(&site.args) {
                let bytes = slot.size.min(8) as usize;
                let mut raw = [0u8; 8];
                // SAFETY: the slot lies inside the caller's frame.
                unsafe {
                    let p = self.lane_ptr(lane).add((top.mem + slot.offset) as usize);
                    std::ptr::copy_nonoverlapping(p, raw.as_mut_ptr(), bytes);
                }
                *value = u64::from_le_bytes(raw);
            }
            let result = match which {
                Builtin::Vprintf => {
                    let fmt = self.c_string(env, block, lane, args[0])?;
                    let mut text = Vec::new();
                    let n = format::format(
                        &fmt,
                        &mut text,
                        &mut Args { warp: self, env, block, lane, at: args[1] },
                    )?;
                    env.host.print(&text);
                    u64::from(n)
                }
                Builtin::AssertFail => {
                    let message = self.c_string(env, block, lane, args[0])?;
                    let file = self.c_string(env, block, lane, args[1])?;
                    let function = self.c_string(env, block, lane, args[3])?;
                    let tid = thread_index(env, self.index, lane as u32);
                    env.host.assertion(&format!(
                        "{}:{}: {}: block: [{},{},{}], thread: [{},{},{}] Assertion `{}` failed.\n",
                        String::from_utf8_lossy(&file),
                        args[2],
                        String::from_utf8_lossy(&function),
                        block.ctaid[0],
                        block.ctaid[1],
                        block.ctaid[2],
                        tid[0],
                        tid[1],
                        tid[2],
                        String::from_utf8_lossy(&message),
                    ));
                    if rest == 0 {
                        return Err(Fault::Assert);
                    }
                    0
                }
                Builtin::Malloc => env.host.malloc(args[0]),
                Builtin::Free => {
                    env.host.free(args[0]);
                    0
                }
            };
            if let Some(slot) = site.rets.first() {
                // SAFETY: the slot lies inside the caller's frame.
                unsafe {
                    let p = self.lane_ptr(lane).add((top.mem + slot.offset) as usize);
                    std::ptr::copy_nonoverlapping(
                        result.to_le_bytes().as_ptr(),
                        p,
                        slot.size.min(8) as usize,
                    );
                }
            }
        }
        Ok(())
    }

    fn c_string(
        &mut self,
        env: &Env,
        block: &mut BlockState,
        lane: usize,
        at: u64,
    ) -> Result<Vec<u8>, Fault> {
        let mut out = Vec::new();
        loop {
            let p = self.locate(env, block, Mem::Generic, at + out.len() as u64, lane, 1, false)?;
            // SAFETY: `locate` checked the byte.
            match unsafe { *p } {
                0 => return Ok(out),
                b if out.len() < 1 << 16 => out.push(b),
                _ => return Ok(out),
            }
        }
    }
}

/// The argument buffer of a `printf`.
struct Args<'a> {
    warp: &'a mut Warp,
    env: &'a Env,
    block: &'a mut BlockState,
    lane: usize,
    at: u64,
}

impl format::Source for Args<'_> {
    type Error = Fault;

    fn word(&mut self, size: u32) -> Result<u64, Fault> {
        self.at = self.at.next_multiple_of(u64::from(size));
        let p = self.warp.locate(self.env, self.block, Mem::Generic, self.at, self.lane, size, false)?;
        self.at += u64::from(size);
        // SAFETY: `locate` checked `size` bytes.
        Ok(unsafe { if size == 8 { *p.cast::<u64>() } else { u64::from(*p.cast::<u32>()) } })
    }

    fn string(&mut self, at: u64) -> Result<Vec<u8>, Fault> {
        self.warp.c_string(self.env, self.block, self.lane, at)
    }
}
