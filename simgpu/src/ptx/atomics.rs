//! Reads, writes and atomic operations on memory that other threads use concurrently.

use super::ast::Ty;
use super::code::AtomOp;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// Reads one element; other threads may write it at the same time.
///
/// # Safety
/// `p` points to an aligned element that stays mapped.
pub unsafe fn fetch(p: *mut u8, ty: Ty) -> u64 {
    // SAFETY: the caller vouches for size and alignment; atomics make races defined.
    unsafe {
        match ty {
            Ty::S8 => (*p.cast::<AtomicU8>()).load(Ordering::Relaxed) as i8 as i64 as u64,
            Ty::S16 => (*p.cast::<AtomicU16>()).load(Ordering::Relaxed) as i16 as i64 as u64,
            Ty::S32 => (*p.cast::<AtomicU32>()).load(Ordering::Relaxed) as i32 as i64 as u64,
            _ => match ty.size() {
                1 => u64::from((*p.cast::<AtomicU8>()).load(Ordering::Relaxed)),
                2 => u64::from((*p.cast::<AtomicU16>()).load(Ordering::Relaxed)),
                4 => u64::from((*p.cast::<AtomicU32>()).load(Ordering::Relaxed)),
                _ => (*p.cast::<AtomicU64>()).load(Ordering::Relaxed),
            },
        }
    }
}

/// Writes one element of `size` bytes.
///
/// # Safety
/// `p` points to an aligned, writable element that stays mapped.
pub unsafe fn put(p: *mut u8, size: u32, v: u64) {
    // SAFETY: the caller vouches for size and alignment; atomics make races defined.
    unsafe {
        match size {
            1 => (*p.cast::<AtomicU8>()).store(v as u8, Ordering::Relaxed),
            2 => (*p.cast::<AtomicU16>()).store(v as u16, Ordering::Relaxed),
            4 => (*p.cast::<AtomicU32>()).store(v as u32, Ordering::Relaxed),
            _ => (*p.cast::<AtomicU64>()).store(v, Ordering::Relaxed),
        }
    }
}

/// Performs an atomic operation and returns the old value.
///
/// # Safety
/// `p` points to an aligned, writable element that stays mapped.
pub unsafe fn atomic(p: *mut u8, op: AtomOp, ty: Ty, x: u64, y: u64) -> u64 {
    // SAFETY: the caller vouches for size and alignment.
    unsafe {
        if ty.size() == 4 {
            let cell = &*p.cast::<AtomicU32>();
            let update = |old: u32| apply(op, ty, u64::from(old), x, y) as u32;
            let old = cell.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |v| Some(update(v)));
            u64::from(old.unwrap_or_else(|v| v))
        } else {
            let cell = &*p.cast::<AtomicU64>();
            let old = cell.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |v| Some(apply(op, ty, v, x, y)));
            old.unwrap_or_else(|v| v)
        }
    }
}

fn apply(op: AtomOp, ty: Ty, old: u64, x: u64, y: u64) -> u64 {
    let (o32, x32) = (old as u32, x as u32);
    match (op, ty) {
        (AtomOp::Add, Ty::F32) => u64::from((f32::from_bits(o32) + f32::from_bits(x32)).to_bits()),
        (AtomOp::Add, Ty::F64) => (f64::from_bits(old) + f64::from_bits(x)).to_bits(),
        (AtomOp::Add, _) => old.wrapping_add(x),
        (AtomOp::Exch, _) => x,
        (AtomOp::And, _) => old & x,
        (AtomOp::Or, _) => old | x,
        (AtomOp::Xor, _) => old ^ x,
        (AtomOp::Cas, _) => {
            let same = if ty.size() == 4 { o32 == x32 } else { old == x };
            if same { y } else { old }
        }
        (AtomOp::Min, Ty::S32) => (o32 as i32).min(x32 as i32) as u64,
        (AtomOp::Max, Ty::S32) => (o32 as i32).max(x32 as i32) as u64,
        (AtomOp::Min, Ty::S64) => (old as i64).min(x as i64) as u64,
        (AtomOp::Max, Ty::S64) => (old as i64).max(x as i64) as u64,
        (AtomOp::Min, _) if ty.size() == 4 => u64::from(o32.min(x32)),
        (AtomOp::Max, _) if ty.size() == 4 => u64::from(o32.max(x32)),
        (AtomOp::Min, _) => old.min(x),
        (AtomOp::Max, _) => old.max(x),
        (AtomOp::Inc, _) => u64::from(if o32 >= x32 { 0 } else { o32 + 1 }),
        (AtomOp::Dec, _) => u64::from(if o32 == 0 || o32 > x32 { x32 } else { o32 - 1 }),
    }
}
