//! One warp: 32 lanes that share an instruction stream, split into groups while they diverge.
//!
//! Among several groups the deepest call runs first, then the lowest program counter. Groups that
//! reach the same place merge. A group that runs long while others wait is suspended for a while,
//! so that a lane that spins on its neighbour cannot starve it.

use super::atomics::atomic;
use super::code::{
    CallSite, Callee, Code, Combine, LOCAL_WINDOW, Mem, NEGATED, NONE, PARAM_WINDOW, PredOp, Reduce,
    SHARED_WINDOW, Vote, WINDOW_MASK,
};
use super::exec::{BlockState, Env, Fault};
use super::rows::{Row, lanes, new_row};
use super::special::{extended, shuffle, special};
use std::sync::atomic::{Ordering, fence};

/// Upper bound of a thread's lane memory, in bytes.
pub const LANE_MEMORY_LIMIT: usize = 512 << 10;
/// Upper bound of a thread's registers, over all nested calls.
pub const ROW_LIMIT: usize = 1 << 16;
/// Instructions after which a group yields to waiting groups.
const FAIR_SLICE: u32 = 4096;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame {
    func: u32,
    ret_pc: u32,
    pub(super) regs: u32,
    preds: u32,
    pub(super) mem: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    None,
    /// Waits at a `.sync` instruction for lanes that have not arrived.
    Lanes,
    /// Waits at block barrier `id`; `red` is the destination of a reduction's result.
    Barrier {
        id: u8,
        red: Option<(Reduce, u32)>,
    },
}

#[derive(Clone)]
struct Group {
    pc: u32,
    mask: u32,
    frames: Vec<Frame>,
    wait: Wait,
    /// `true` if it has used up its slice while others waited.
    aside: bool,
    /// `true` if its `.sync` instruction runs without the missing lanes.
    forced: bool,
}

impl Group {
    fn top(&self) -> Frame {
        self.frames[self.frames.len() - 1]
    }
}

/// Why a warp stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Done,
    /// Every lane waits at a block barrier.
    Blocked,
    /// The budget is used up.
    Yield,
}

enum Flow {
    Next,
    /// Select a group again.
    Again,
    Finished,
}

pub struct Warp {
    pub(super) index: u32,
    pub(super) regs: Vec<Row>,
    preds: Vec<u32>,
    groups: Vec<Group>,
    live: u32,
    pub(super) memory: Vec<u64>,
    /// Bytes of lane memory per lane.
    pub(super) lane_bytes: usize,
    pub(super) last_span: usize,
}

impl Warp {
    /// Creates a warp with `threads` lanes at the kernel's start.
    pub fn new(env: &Env, index: u32, threads: u32) -> Warp {
        let func = &env.program.funcs[env.func as usize];
        let live = if threads >= 32 { u32::MAX } else { (1 << threads) - 1 };
        let mut warp = Warp {
            index,
            regs: Vec::new(),
            preds: Vec::new(),
            groups: Vec::new(),
            live,
            memory: Vec::new(),
            lane_bytes: 0,
            last_span: 0,
        };
        let frame = Frame { func: env.func, ret_pc: NONE, regs: 0, preds: 0, mem: 0 };
        warp.groups.push(Group {
            pc: func.start,
            mask: live,
            frames: vec![frame],
            wait: Wait::None,
            aside: false,
            forced: false,
        });
        // A kernel's first frame always fits, since compilation bounds it.
        let _ = warp.enter(env, env.func, frame, u32::MAX);
        warp
    }

    /// Allocates a function's registers and memory, and fills its constants.
    fn enter(&mut self, env: &Env, func: u32, frame: Frame, mask: u32) -> Result<(), Fault> {
        let f = &env.program.funcs[func as usize];
        let rows = (frame.regs + f.rows) as usize;
        if rows > ROW_LIMIT {
            return Err(Fault::Illegal(LOCAL_WINDOW));
        }
        if self.regs.len() < rows {
            self.regs.resize_with(rows, new_row);
        }
        let preds = (frame.preds + f.preds) as usize;
        if self.preds.len() < preds {
            self.preds.resize(preds, 0);
        }
        let bytes = (frame.mem + f.frame_size) as usize;
        if self.lane_bytes < bytes {
            if bytes > LANE_MEMORY_LIMIT {
                return Err(Fault::Illegal(LOCAL_WINDOW));
            }
            let new = if self.lane_bytes == 0 { bytes } else { bytes * 2 }.next_multiple_of(16);
            let mut memory = vec![0u64; new / 8 * 32];
            let old_words = self.lane_bytes / 8;
            for lane in 0..32 {
                memory[lane * (new / 8)..][..old_words]
                    .copy_from_slice(&self.memory[lane * old_words..][..old_words]);
            }
            self.memory = memory;
            self.lane_bytes = new;
        }
        for (i, value) in env.consts[func as usize].iter().enumerate() {
            let row = &self.regs[frame.regs as usize + f.const_base as usize + i];
            lanes(mask, |l| row[l].set(*value));
        }
        Ok(())
    }

    pub fn done(&self) -> bool {
        self.groups.is_empty()
    }

    /// Resumes the groups at barrier `id`.
    pub fn release(&mut self, id: u8, result: u32) {
        for g in &mut self.groups {
            if let Wait::Barrier { id: at, red } = g.wait
                && at == id
            {
                g.wait = Wait::None;
                let top = g.frames[g.frames.len() - 1];
                match red {
                    Some((Reduce::Popc, d)) => {
                        let row = &self.regs[(top.regs + d) as usize];
                        lanes(g.mask, |l| row[l].set(u64::from(result)));
                    }
                    Some((_, d)) => {
                        let p = &mut self.preds[(top.preds + d) as usize];
                        *p = if result != 0 { *p | g.mask } else { *p & !g.mask };
                    }
                    None => {}
                }
            }
        }
    }

    /// Merges groups at the same place.
    fn merge(&mut self) {
        let mut i = 0;
        while i < self.groups.len() {
            let mut j = i + 1;
            while j < self.groups.len() {
                let (a, b) = (&self.groups[i], &self.groups[j]);
                let free = |w: Wait| !matches!(w, Wait::Barrier { .. });
                if a.pc == b.pc && free(a.wait) && free(b.wait) && a.frames == b.frames {
                    let gone = self.groups.swap_remove(j);
                    let kept = &mut self.groups[i];
                    kept.mask |= gone.mask;
                    kept.wait = Wait::None;
                    kept.aside = kept.aside && gone.aside;
                } else {
                    j += 1;
                }
            }
            i += 1;
        }
    }

    fn pick(&mut self) -> Option<usize> {
        let best = |groups: &[Group]| {
            (0..groups.len())
                .filter(|&i| groups[i].wait == Wait::None && !groups[i].aside)
                .min_by_key(|&i| (std::cmp::Reverse(groups[i].frames.len()), groups[i].pc))
        };
        if let Some(i) = best(&self.groups) {
            return Some(i);
        }
        self.groups.iter_mut().for_each(|g| g.aside = false);
        if let Some(i) = best(&self.groups) {
            return Some(i);
        }
        // Lanes wait for lanes that wait elsewhere: the first of them continue without the others.
        let stuck = (0..self.groups.len())
            .filter(|&i| self.groups[i].wait == Wait::Lanes)
            .min_by_key(|&i| self.groups[i].pc)?;
        self.groups[stuck].wait = Wait::None;
        self.groups[stuck].forced = true;
        Some(stuck)
    }

    /// Runs until all lanes are done or wait, or until the budget is used up.
    pub fn run(&mut self, env: &Env, block: &mut BlockState, budget: &mut u32) -> Result<Status, Fault> {
        loop {
            if self.groups.len() > 1 {
                self.merge();
            }
            if self.groups.is_empty() {
                return Ok(Status::Done);
            }
            let Some(i) = self.pick() else { return Ok(Status::Blocked) };
            if *budget == 0 {
                return Ok(Status::Yield);
            }
            let mut g = self.groups.swap_remove(i);
            let alone = self.groups.is_empty();
            let depth = g.frames.len();
            let stop = if alone {
                u32::MAX
            } else {
                self.groups
                    .iter()
                    .filter(|o| o.frames.len() == depth && !matches!(o.wait, Wait::Barrier { .. }))
                    .map(|o| o.pc)
                    .min()
                    .unwrap_or(u32::MAX)
            };
            let mut slice = if alone { u32::MAX } else { FAIR_SLICE };
            loop {
                match self.step(env, block, &mut g)? {
                    Flow::Next => {}
                    Flow::Again => {
                        self.groups.push(g);
                        break;
                    }
                    Flow::Finished => break,
                }
                *budget -= 1;
                slice -= 1;
                if *budget == 0 || slice == 0 || g.pc >= stop {
                    g.aside = slice == 0 && !alone;
                    self.groups.push(g);
                    break;
                }
            }
            *budget = budget.saturating_sub(1);
        }
    }

    fn guard(&self, top: Frame, guard: u32, mask: u32) -> u32 {
        if guard == NONE {
            return mask;
        }
        let p = self.preds[(top.preds + (guard & !NEGATED)) as usize];
        mask & if guard & NEGATED != 0 { !p } else { p }
    }

    fn pred_bits(&self, top: Frame, p: u32) -> u32 {
        self.guard(top, p, u32::MAX)
    }

    fn set_pred(&mut self, top: Frame, p: u32, bits: u32, mask: u32) {
        if p != NONE {
            let slot = &mut self.preds[(top.preds + p) as usize];
            *slot = (*slot & !mask) | (bits & mask);
        }
    }

    fn combined(&self, top: Frame, bits: u32, with: Combine) -> u32 {
        match with {
            Combine::None => bits,
            Combine::And(c) => bits & self.pred_bits(top, c),
            Combine::Or(c) => bits | self.pred_bits(top, c),
            Combine::Xor(c) => bits ^ self.pred_bits(top, c),
        }
    }

    /// Makes a group wait at a `.sync` instruction until all live lanes in `mask` have arrived.
    fn gather(&self, g: &mut Group, mask_row: &Row, active: u32) -> bool {
        let lane = active.trailing_zeros() as usize;
        let needed = mask_row[lane & 31].get() as u32 & self.live;
        if g.mask & needed == needed || g.forced {
            g.forced = false;
            return true;
        }
        g.wait = Wait::Lanes;
        false
    }

    #[expect(clippy::too_many_lines, reason = "one `match` over the instructions")]
    fn step(&mut self, env: &Env, block: &mut BlockState, g: &mut Group) -> Result<Flow, Fault> {
        let Some(instr) = env.program.code.get(g.pc as usize) else { return Err(Fault::BadPc) };
        let top = g.top();
        let active = self.guard(top, instr.guard, g.mask);
        let base = top.regs as usize;
        if active == 0 {
            g.pc += 1;
            return Ok(Flow::Next);
        }
        macro_rules! row {
            ($i:expr) => {
                &self.regs[base + *$i as usize]
            };
        }
        match &instr.code {
            Code::Un { f, d, a } => f(row!(d), row!(a), active),
            Code::Bin { f, d, a, b } => f(row!(d), row!(a), row!(b), active),
            Code::Tri { f, d, a, b, c } => f(row!(d), row!(a), row!(b), row!(c), active),
            Code::Quad { f, d, a, b, c, e } => f(row!(d), row!(a), row!(b), row!(c), row!(e), active),
            Code::Mov { d, a } => {
                let (d, a) = (row!(d), row!(a));
                lanes(active, |l| d[l].set(a[l].get()));
            }
            Code::Carry { k, d, a, b, c } => {
                let flags = self.preds[(top.preds + k.flag) as usize];
                let (d, a, b, c) = (row!(d), row!(a), row!(b), row!(c));
                let mut out = 0;
                lanes(active, |l| {
                    let (v, carry) = extended(k, a[l].get(), b[l].get(), c[l].get(), (flags >> l) & 1 == 1);
                    d[l].set(v);
                    out |= u32::from(carry) << l;
                });
                if k.carry_out {
                    self.set_pred(top, k.flag, out, active);
                }
            }
            Code::Pack { d, parts, n, bits } => {
                let d = row!(d);
                let mask = if *bits >= 64 { u64::MAX } else { (1u64 << bits) - 1 };
                lanes(active, |l| {
                    let mut v = 0;
                    for (i, p) in parts.iter().take(usize::from(*n)).enumerate() {
                        v |= (row!(p)[l].get() & mask) << (i as u32 * u32::from(*bits));
                    }
                    d[l].set(v);
                });
            }
            Code::Unpack { parts, n, bits, a } => {
                let mask = if *bits >= 64 { u64::MAX } else { (1u64 << bits) - 1 };
                lanes(active, |l| {
                    let v = row!(a)[l].get();
                    for (i, p) in parts.iter().take(usize::from(*n)).enumerate() {
                        if *p != NONE {
                            row!(p)[l].set((v >> (i as u32 * u32::from(*bits))) & mask);
                        }
                    }
                });
            }
            Code::SetP { f, p, q, a, b, with } => {
                let bits = f(row!(a), row!(b), active);
                let first = self.combined(top, bits, *with);
                let second = self.combined(top, !bits, *with);
                self.set_pred(top, *p, first, active);
                self.set_pred(top, *q, second, active);
            }
            Code::Set { f, d, a, b, with, float } => {
                let bits = f(row!(a), row!(b), active);
                let bits = self.combined(top, bits, *with);
                let yes = if *float { u64::from(1f32.to_bits()) } else { u64::from(u32::MAX) };
                let d = row!(d);
                lanes(active, |l| d[l].set(if (bits >> l) & 1 == 1 { yes } else { 0 }));
            }
            Code::Selp { d, a, b, p } => {
                let bits = self.pred_bits(top, *p);
                let (d, a, b) = (row!(d), row!(a), row!(b));
                lanes(active, |l| d[l].set(if (bits >> l) & 1 == 1 { a[l].get() } else { b[l].get() }));
            }
            Code::Pred { op, d, a, b } => {
                let (x, y) = (self.pred_bits(top, *a), self.pred_bits(top, *b));
                let bits = match op {
                    PredOp::And => x & y,
                    PredOp::Or => x | y,
                    PredOp::Xor => x ^ y,
                    PredOp::Not => !x,
                    PredOp::Mov => x,
                };
                self.set_pred(top, *d, bits, active);
            }
            Code::PredConst { d, value } => self.set_pred(top, *d, if *value { u32::MAX } else { 0 }, active),
            Code::Special { d, which } => {
                let d = row!(d);
                lanes(active, |l| d[l].set(special(env, block, self.index, l as u32, *which)));
            }
            Code::FrameAddr { d, offset } => {
                let (d, v) = (row!(d), u64::from(top.mem + offset));
                lanes(active, |l| d[l].set(v));
            }
            Code::Cvta { d, a, window, to } => {
                let (d, a) = (row!(d), row!(a));
                lanes(active, |l| {
                    let v = a[l].get();
                    d[l].set(if *to { v & !if *window == 0 { 0 } else { WINDOW_MASK } } else { v | window });
                });
            }
            Code::IsSpace { p, a, mem } => {
                let mut bits = 0;
                lanes(active, |l| {
                    let window = row!(a)[l].get() & WINDOW_MASK;
                    let hit = match mem {
                        Mem::Shared => window == SHARED_WINDOW,
                        Mem::Local => window == LOCAL_WINDOW,
                        Mem::Param => window == PARAM_WINDOW,
                        _ => window == 0,
                    };
                    bits |= u32::from(hit) << l;
                });
                self.set_pred(top, *p, bits, active);
            }
            Code::Ld { d, n, ty, at } => self.load(env, block, top, active, d, *n, *ty, at)?,
            Code::St { s, n, ty, at } => self.store(env, block, top, active, s, *n, *ty, at)?,
            Code::Atom { op, ty, d, at, b, c } => {
                let size = ty.size();
                let mut rest = active;
                while rest != 0 {
                    let l = rest.trailing_zeros() as usize;
                    rest &= rest - 1;
                    let p = self.resolve(env, block, top, at, l, size, true)?;
                    let (x, y) = (row!(b)[l].get(), row!(c)[l].get());
                    // SAFETY: `resolve` checked bounds and alignment of `size` bytes, which stay
                    // mapped during the launch.
                    let old = unsafe { atomic(p, *op, *ty, x, y) };
                    if *d != NONE {
                        row!(d)[l].set(old);
                    }
                }
            }
            Code::Bra { target } => {
                let rest = g.mask & !active;
                if rest == 0 {
                    g.pc = *target;
                    return Ok(Flow::Next);
                }
                let mut taken = g.clone();
                (taken.pc, taken.mask) = (*target, active);
                g.mask = rest;
                g.pc += 1;
                self.groups.push(taken);
                return Ok(Flow::Again);
            }
            Code::Brx { targets, index } => {
                let mut rest = active;
                let mut next = Vec::new();
                while rest != 0 {
                    let value = row!(index)[rest.trailing_zeros() as usize].get() as u32;
                    let mut same = 0;
                    lanes(rest, |l| same |= u32::from(row!(index)[l].get() as u32 == value) << l);
                    rest &= !same;
                    let target = *targets.get(value as usize).ok_or(Fault::BadPc)?;
                    next.push((target, same));
                }
                if g.mask != active {
                    next.push((g.pc + 1, g.mask & !active));
                }
                for (pc, mask) in &next[1..] {
                    let mut other = g.clone();
                    (other.pc, other.mask) = (*pc, *mask);
                    self.groups.push(other);
                }
                (g.pc, g.mask) = next[0];
                return Ok(if next.len() > 1 { Flow::Again } else { Flow::Next });
            }
            Code::Call(site) => return self.call(env, block, g, active, site),
            Code::Ret if g.frames.len() > 1 => {
                self.copy_results(env, g, active);
                let rest = g.mask & !active;
                if rest != 0 {
                    let mut other = g.clone();
                    other.mask = rest;
                    other.pc += 1;
                    self.groups.push(other);
                }
                g.mask = active;
                g.pc = top.ret_pc;
                g.frames.pop();
                return Ok(Flow::Again);
            }
            Code::Ret | Code::Exit => {
                g.mask &= !active;
                self.live &= !active;
                block.live -= active.count_ones();
                for other in &mut self.groups {
                    if other.wait == Wait::Lanes {
                        other.wait = Wait::None;
                    }
                }
                if g.mask == 0 {
                    return Ok(Flow::Finished);
                }
            }
            Code::Trap => return Err(Fault::Trap),
            Code::Bar { id, count, arrive } => {
                let lane = active.trailing_zeros() as usize;
                let id = row!(id)[lane].get() as u8 & 15;
                let count = if *count == NONE { 0 } else { row!(count)[lane].get() as u32 };
                block.arrive(id, count, active.count_ones(), None);
                if !*arrive {
                    return Ok(self.park(g, active, Wait::Barrier { id, red: None }));
                }
            }
            Code::BarRed { op, d, id, count, p } => {
                let lane = active.trailing_zeros() as usize;
                let id = row!(id)[lane].get() as u8 & 15;
                let count = if *count == NONE { 0 } else { row!(count)[lane].get() as u32 };
                let yes = (self.pred_bits(top, *p) & active).count_ones();
                block.arrive(id, count, active.count_ones(), Some((*op, yes)));
                return Ok(self.park(g, active, Wait::Barrier { id, red: Some((*op, *d)) }));
            }
            Code::BarWarp { mask } => {
                if !self.gather(g, row!(mask), active) {
                    return Ok(Flow::Again);
                }
            }
            Code::Shfl { mode, d, p, a, b, c, mask } => {
                if !self.gather(g, row!(mask), active) {
                    return Ok(Flow::Again);
                }
                let bits = shuffle(*mode, active, row!(d), row!(a), row!(b), row!(c));
                self.set_pred(top, *p, bits, active);
            }
            Code::Vote { mode, d, p, mask } => {
                if !self.gather(g, row!(mask), active) {
                    return Ok(Flow::Again);
                }
                let members = row!(mask)[active.trailing_zeros() as usize].get() as u32 & active;
                let votes = self.pred_bits(top, *p) & members;
                let verdict = match mode {
                    Vote::Ballot => {
                        let d = row!(d);
                        lanes(active, |l| d[l].set(u64::from(votes)));
                        g.pc += 1;
                        return Ok(Flow::Next);
                    }
                    Vote::All => votes == members,
                    Vote::Any => votes != 0,
                    Vote::Uni => votes == members || votes == 0,
                };
                self.set_pred(top, *d, if verdict { u32::MAX } else { 0 }, active);
            }
            Code::Match { all, wide, d, p, a, mask } => {
                if !self.gather(g, row!(mask), active) {
                    return Ok(Flow::Again);
                }
                let members = row!(mask)[active.trailing_zeros() as usize].get() as u32 & active;
                let (d, a) = (row!(d), row!(a));
                let value = |l: usize| if *wide { a[l].get() } else { a[l].get() & 0xffff_ffff };
                let mut same_all = 0;
                let out: [u32; 32] = std::array::from_fn(|l| {
                    let mut same = 0;
                    lanes(members, |o| same |= u32::from(value(o) == value(l)) << o);
                    same
                });
                lanes(active, |l| {
                    let hit = if *all { u32::from(out[l] == members) * members } else { out[l] };
                    same_all |= u32::from(out[l] == members) << l;
                    d[l].set(u64::from(hit));
                });
                self.set_pred(top, *p, same_all, active);
            }
            Code::Redux { op, signed, d, a, mask } => {
                if !self.gather(g, row!(mask), active) {
                    return Ok(Flow::Again);
                }
                let (d, a) = (row!(d), row!(a));
                let mut result: Option<u32> = None;
                lanes(active, |l| {
                    let v = a[l].get() as u32;
                    result = Some(result.map_or(v, |r| match op {
                        Reduce::Add | Reduce::Popc => r.wrapping_add(v),
                        Reduce::And => r & v,
                        Reduce::Or => r | v,
                        Reduce::Xor => r ^ v,
                        Reduce::Min if *signed => (r as i32).min(v as i32) as u32,
                        Reduce::Max if *signed => (r as i32).max(v as i32) as u32,
                        Reduce::Min => r.min(v),
                        Reduce::Max => r.max(v),
                    }));
                });
                lanes(active, |l| d[l].set(u64::from(result.unwrap_or(0))));
            }
            Code::ActiveMask { d } => {
                let d = row!(d);
                lanes(active, |l| d[l].set(u64::from(active)));
            }
            Code::Fetch(fetch) => {
                self.fetch_texels(env, block, top, active, fetch)?;
                // Without sparse arrays, every texel has memory.
                self.set_pred(top, fetch.hit, u32::MAX, active);
            }
            Code::Surface(access) => self.access_surface(env, block, top, active, access)?,
            Code::Fence => fence(Ordering::SeqCst),
            Code::Nanosleep { a } => {
                let ns = row!(a)[active.trailing_zeros() as usize].get() as u32;
                std::thread::sleep(std::time::Duration::from_nanos(u64::from(ns.min(1_000_000))));
            }
            Code::Nop => {}
        }
        g.pc += 1;
        Ok(Flow::Next)
    }

    /// Makes the active lanes of a group wait; the others continue.
    fn park(&mut self, g: &mut Group, active: u32, wait: Wait) -> Flow {
        g.pc += 1;
        let rest = g.mask & !active;
        if rest != 0 {
            let mut other = g.clone();
            other.mask = rest;
            self.groups.push(other);
        }
        g.mask = active;
        g.wait = wait;
        Flow::Again
    }

    fn call(
        &mut self,
        env: &Env,
        block: &mut BlockState,
        g: &mut Group,
        active: u32,
        site: &CallSite,
    ) -> Result<Flow, Fault> {
        let top = g.top();
        let mut calling = active;
        let func = match site.callee {
            Callee::Builtin(which) => {
                self.builtin(env, block, top, active, which, site)?;
                g.pc += 1;
                return Ok(Flow::Next);
            }
            Callee::Func(f) => f,
            Callee::Row(r) => {
                let row = &self.regs[(top.regs + r) as usize];
                let target = row[active.trailing_zeros() as usize].get();
                calling = 0;
                lanes(active, |l| calling |= u32::from(row[l].get() == target) << l);
                *env.program.addresses.get(&target).ok_or(Fault::BadPc)?
            }
        };
        let caller = &env.program.funcs[top.func as usize];
        let callee = &env.program.funcs[func as usize];
        if callee.entry {
            return Err(Fault::BadPc);
        }
        let frame = Frame {
            func,
            ret_pc: g.pc + 1,
            regs: top.regs + caller.rows,
            preds: top.preds + caller.preds,
            mem: top.mem + caller.frame_size,
        };
        self.enter(env, func, frame, calling)?;
        for (from, to) in site.args.iter().zip(&callee.params) {
            self.copy_lane(calling, top.mem + from.offset, frame.mem + to.offset, from.size.min(to.size));
        }
        // Lanes with another target repeat the call; inactive lanes skip it.
        for (mask, pc) in [(active & !calling, g.pc), (g.mask & !active, g.pc + 1)] {
            if mask != 0 {
                let mut other = g.clone();
                (other.mask, other.pc) = (mask, pc);
                self.groups.push(other);
            }
        }
        g.mask = calling;
        g.frames.push(frame);
        g.pc = callee.start;
        Ok(Flow::Again)
    }

    fn copy_results(&mut self, env: &Env, g: &Group, active: u32) {
        let top = g.top();
        let below = g.frames[g.frames.len() - 2];
        let callee = &env.program.funcs[top.func as usize];
        if let Code::Call(site) = &env.program.code[top.ret_pc as usize - 1].code {
            for (from, to) in callee.rets.iter().zip(&site.rets) {
                self.copy_lane(active, top.mem + from.offset, below.mem + to.offset, from.size.min(to.size));
            }
        }
    }
}
