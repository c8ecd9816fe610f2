//! Registers of a warp as rows of 32 lanes, and loops over their active lanes.

use std::cell::Cell;

/// One register of all 32 lanes. Values narrower than 64 bits are stored extended according to
/// their type.
pub type Row = [Cell<u64>; 32];

pub type Fn1 = fn(&Row, &Row, u32);
pub type Fn2 = fn(&Row, &Row, &Row, u32);
pub type Fn3 = fn(&Row, &Row, &Row, &Row, u32);
pub type Fn4 = fn(&Row, &Row, &Row, &Row, &Row, u32);
/// Compares two rows; the result has a bit per lane for which it holds.
pub type FnCmp = fn(&Row, &Row, u32) -> u32;

pub fn new_row() -> Row {
    std::array::from_fn(|_| Cell::new(0))
}

/// Conversion of a scalar type to and from a lane's 64 bits.
pub trait Lane: Copy {
    fn get(raw: u64) -> Self;
    fn put(self) -> u64;
}

macro_rules! lane_int {
    ($($t:ty => $wide:ty),*) => {$(
        impl Lane for $t {
            #[inline(always)]
            fn get(raw: u64) -> Self { raw as $t }
            #[inline(always)]
            fn put(self) -> u64 { self as $wide as u64 }
        }
    )*};
}
lane_int!(u8 => u64, u16 => u64, u32 => u64, u64 => u64, i8 => i64, i16 => i64, i32 => i64, i64 => i64);

impl Lane for f32 {
    #[inline(always)]
    fn get(raw: u64) -> Self {
        f32::from_bits(raw as u32)
    }
    #[inline(always)]
    fn put(self) -> u64 {
        u64::from(self.to_bits())
    }
}

impl Lane for f64 {
    #[inline(always)]
    fn get(raw: u64) -> Self {
        f64::from_bits(raw)
    }
    #[inline(always)]
    fn put(self) -> u64 {
        self.to_bits()
    }
}

/// Calls `f` for every lane in `mask`.
#[inline(always)]
pub fn lanes(mask: u32, mut f: impl FnMut(usize)) {
    if mask == u32::MAX {
        for lane in 0..32 {
            f(lane);
        }
    } else {
        let mut rest = mask;
        while rest != 0 {
            f(rest.trailing_zeros() as usize);
            rest &= rest - 1;
        }
    }
}

#[inline(always)]
pub fn map1<A: Lane, R: Lane>(d: &Row, a: &Row, m: u32, f: impl Fn(A) -> R) {
    lanes(m, |l| d[l].set(f(A::get(a[l].get())).put()));
}

#[inline(always)]
pub fn map2<A: Lane, B: Lane, R: Lane>(d: &Row, a: &Row, b: &Row, m: u32, f: impl Fn(A, B) -> R) {
    lanes(m, |l| d[l].set(f(A::get(a[l].get()), B::get(b[l].get())).put()));
}

#[inline(always)]
pub fn map3<A: Lane, B: Lane, C: Lane, R: Lane>(
    d: &Row,
    (a, b, c): (&Row, &Row, &Row),
    m: u32,
    f: impl Fn(A, B, C) -> R,
) {
    lanes(m, |l| d[l].set(f(A::get(a[l].get()), B::get(b[l].get()), C::get(c[l].get())).put()));
}

#[inline(always)]
pub fn compare<A: Lane>(a: &Row, b: &Row, m: u32, f: impl Fn(A, A) -> bool) -> u32 {
    let mut out = 0;
    lanes(m, |l| out |= u32::from(f(A::get(a[l].get()), A::get(b[l].get()))) << l);
    out
}
