//! Chooses the row function for an arithmetic opcode.

use super::ast::Ty;
use super::round::{Directed, RM, RN, RP, RZ, f16_to_f32, f32_to_f16, integral, to_f32};
use super::rows::{Fn1, Fn2, Fn3, Fn4, FnCmp, Lane, Row, compare, lanes, map1, map2, map3};

/// An integer type of a lane.
pub trait Int: Lane {
    const MIN: i128;
    const MAX: i128;
    fn wide(self) -> i128;
    fn wrap(v: i128) -> Self;
}

macro_rules! int_impl {
    ($($t:ty),*) => {$(
        impl Int for $t {
            const MIN: i128 = <$t>::MIN as i128;
            const MAX: i128 = <$t>::MAX as i128;
            fn wide(self) -> i128 { self as i128 }
            fn wrap(v: i128) -> Self { v as $t }
        }
    )*};
}
int_impl!(u8, u16, u32, u64, i8, i16, i32, i64);

macro_rules! by_int {
    ($ty:expr, $t:ident => $e:expr) => {
        match $ty {
            Ty::U8 | Ty::B8 => {
                type $t = u8;
                Some($e)
            }
            Ty::U16 | Ty::B16 => {
                type $t = u16;
                Some($e)
            }
            Ty::U32 | Ty::B32 => {
                type $t = u32;
                Some($e)
            }
            Ty::U64 | Ty::B64 => {
                type $t = u64;
                Some($e)
            }
            Ty::S8 => {
                type $t = i8;
                Some($e)
            }
            Ty::S16 => {
                type $t = i16;
                Some($e)
            }
            Ty::S32 => {
                type $t = i32;
                Some($e)
            }
            Ty::S64 => {
                type $t = i64;
                Some($e)
            }
            _ => None,
        }
    };
}

macro_rules! by_float {
    ($ty:expr, $t:ident => $e:expr) => {
        match $ty {
            Ty::F32 => {
                type $t = f32;
                Some($e)
            }
            Ty::F64 => {
                type $t = f64;
                Some($e)
            }
            _ => None,
        }
    };
}

macro_rules! by_rounding {
    ($r:expr, $R:ident => $e:expr) => {
        match $r {
            RN => {
                const $R: u8 = RN;
                $e
            }
            RZ => {
                const $R: u8 = RZ;
                $e
            }
            RM => {
                const $R: u8 = RM;
                $e
            }
            _ => {
                const $R: u8 = RP;
                $e
            }
        }
    };
}

fn is_float(ty: Ty) -> bool {
    matches!(ty, Ty::F32 | Ty::F64)
}

fn rounding(mods: &[&str]) -> u8 {
    for m in mods {
        match *m {
            "rz" | "rzi" => return RZ,
            "rm" | "rmi" => return RM,
            "rp" | "rpi" => return RP,
            _ => {}
        }
    }
    RN
}

/// Returns `true` if an arithmetic opcode has only known modifiers; others make it an unknown
/// opcode.
fn known(mods: &[&str], extra: &[&str]) -> bool {
    mods.iter().all(|m| {
        matches!(*m, "rn" | "rz" | "rm" | "rp" | "ftz" | "approx" | "full" | "lo") || extra.contains(m)
    })
}

fn saturate(ty: Ty) -> Option<Fn1> {
    by_float!(ty, T => |d, a, m| map1::<T, T>(d, a, m, |v| if v.is_nan() { 0.0 } else { v.clamp(0.0, 1.0) }))
}

/// Returns the clamp to apply after a floating-point operation with `.sat`.
pub fn after(mods: &[&str], ty: Ty) -> Option<Fn1> {
    if mods.contains(&"sat") { saturate(ty) } else { None }
}

pub fn unary(op: &str, mods: &[&str], ty: Ty) -> Option<Fn1> {
    if !known(mods, &["sat"]) {
        return None;
    }
    let r = rounding(mods);
    match op {
        "neg" if is_float(ty) => by_float!(ty, T => |d, a, m| map1::<T, T>(d, a, m, |v| -v)),
        "abs" if is_float(ty) => by_float!(ty, T => |d, a, m| map1::<T, T>(d, a, m, T::abs)),
        "neg" => by_int!(ty, T => |d, a, m| map1::<T, T>(d, a, m, |v| T::wrap(-v.wide()))),
        "abs" => by_int!(ty, T => |d, a, m| map1::<T, T>(d, a, m, |v| T::wrap(v.wide().abs()))),
        "not" | "cnot" if op == "not" => by_int!(ty, T => |d, a, m| map1::<T, T>(d, a, m, |v| !v)),
        "cnot" => by_int!(ty, T => |d, a, m| map1::<T, T>(d, a, m, |v| T::from(v == 0))),
        "popc" => by_int!(ty, T => |d, a, m| map1::<T, u32>(d, a, m, |v| v.count_ones())),
        "clz" => by_int!(ty, T => |d, a, m| map1::<T, u32>(d, a, m, |v| v.leading_zeros())),
        "brev" => by_int!(ty, T => |d, a, m| map1::<T, T>(d, a, m, |v| v.reverse_bits())),
        "bfind" => by_int!(ty, T => |d, a, m| map1::<T, u32>(d, a, m, |v| {
            let v = if v.wide() < 0 { !v } else { v };
            (T::BITS - v.leading_zeros()).wrapping_sub(1)
        })),
        "sqrt" => by_float!(ty, T => by_rounding!(r, R => |d, a, m| map1::<T, T>(d, a, m, T::sqrt_r::<R>))),
        "rcp" => by_float!(ty, T => by_rounding!(r, R => |d, a, m| map1::<T, T>(d, a, m, |v| {
            let one: T = 1.0;
            if R == RN { one / v } else { one.div_r::<R>(v) }
        }))),
        "rsqrt" => by_float!(ty, T => |d, a, m| map1::<T, T>(d, a, m, |v| 1.0 / v.sqrt())),
        "ex2" => by_float!(ty, T => |d, a, m| map1::<T, T>(d, a, m, T::exp2)),
        "lg2" => by_float!(ty, T => |d, a, m| map1::<T, T>(d, a, m, T::log2)),
        "sin" => by_float!(ty, T => |d, a, m| map1::<T, T>(d, a, m, T::sin)),
        "cos" => by_float!(ty, T => |d, a, m| map1::<T, T>(d, a, m, T::cos)),
        "tanh" => by_float!(ty, T => |d, a, m| map1::<T, T>(d, a, m, T::tanh)),
        _ => None,
    }
}

fn div_int<T: Int>(d: &Row, a: &Row, b: &Row, m: u32) {
    map2::<T, T, T>(
        d,
        a,
        b,
        m,
        |x, y| if y.wide() == 0 { T::wrap(-1) } else { T::wrap(x.wide() / y.wide()) },
    );
}

fn rem_int<T: Int>(d: &Row, a: &Row, b: &Row, m: u32) {
    map2::<T, T, T>(d, a, b, m, |x, y| if y.wide() == 0 { x } else { T::wrap(x.wide() % y.wide()) });
}

pub fn binary(op: &str, mods: &[&str], ty: Ty) -> Option<Fn2> {
    let r = rounding(mods);
    if is_float(ty) {
        if !known(mods, &["sat"]) {
            return None;
        }
        return match op {
            "add" => {
                by_float!(ty, T => by_rounding!(r, R => |d, a, b, m| map2::<T, T, T>(d, a, b, m, |x, y| {
                    if R == RN { x + y } else { x.add_r::<R>(y) }
                })))
            }
            "sub" => {
                by_float!(ty, T => by_rounding!(r, R => |d, a, b, m| map2::<T, T, T>(d, a, b, m, |x, y| {
                    if R == RN { x - y } else { x.add_r::<R>(-y) }
                })))
            }
            "mul" => {
                by_float!(ty, T => by_rounding!(r, R => |d, a, b, m| map2::<T, T, T>(d, a, b, m, |x, y| {
                    if R == RN { x * y } else { x.mul_r::<R>(y) }
                })))
            }
            "div" => {
                by_float!(ty, T => by_rounding!(r, R => |d, a, b, m| map2::<T, T, T>(d, a, b, m, |x, y| {
                    if R == RN { x / y } else { x.div_r::<R>(y) }
                })))
            }
            "min" => by_float!(ty, T => |d, a, b, m| map2::<T, T, T>(d, a, b, m, T::min)),
            "max" => by_float!(ty, T => |d, a, b, m| map2::<T, T, T>(d, a, b, m, T::max)),
            "copysign" => by_float!(ty, T => |d, a, b, m| map2::<T, T, T>(d, a, b, m, |x, y| y.copysign(x))),
            _ => None,
        };
    }
    let has = |m: &str| mods.contains(&m);
    match op {
        "bmsk" if has("clamp") => {
            return Some(|d, a, b, m| map2::<u32, u32, u32>(d, a, b, m, ones));
        }
        "bmsk" if has("wrap") => {
            return Some(|d, a, b, m| map2::<u32, u32, u32>(d, a, b, m, |p, n| ones(p & 31, n & 31)));
        }
        "szext" if has("clamp") => return szext(ty, false),
        "szext" if has("wrap") => return szext(ty, true),
        _ => {}
    }
    if !known(mods, &["hi", "wide", "sat"]) {
        return None;
    }
    match op {
        "add" if has("sat") => by_int!(ty, T => |d, a, b, m| map2::<T, T, T>(d, a, b, m, T::saturating_add)),
        "sub" if has("sat") => by_int!(ty, T => |d, a, b, m| map2::<T, T, T>(d, a, b, m, T::saturating_sub)),
        "add" => by_int!(ty, T => |d, a, b, m| map2::<T, T, T>(d, a, b, m, T::wrapping_add)),
        "sub" => by_int!(ty, T => |d, a, b, m| map2::<T, T, T>(d, a, b, m, T::wrapping_sub)),
        "mul" if has("wide") => match ty {
            Ty::U16 | Ty::B16 => {
                Some(|d, a, b, m| map2::<u16, u16, u32>(d, a, b, m, |x, y| u32::from(x) * u32::from(y)))
            }
            Ty::S16 => {
                Some(|d, a, b, m| map2::<i16, i16, i32>(d, a, b, m, |x, y| i32::from(x) * i32::from(y)))
            }
            Ty::U32 | Ty::B32 => {
                Some(|d, a, b, m| map2::<u32, u32, u64>(d, a, b, m, |x, y| u64::from(x) * u64::from(y)))
            }
            Ty::S32 => {
                Some(|d, a, b, m| map2::<i32, i32, i64>(d, a, b, m, |x, y| i64::from(x) * i64::from(y)))
            }
            _ => None,
        },
        "mul" if has("hi") => match ty {
            // The product of two 64-bit unsigned values needs all of u128.
            Ty::U64 | Ty::B64 => Some(|d, a, b, m| {
                map2::<u64, u64, u64>(d, a, b, m, |x, y| ((u128::from(x) * u128::from(y)) >> 64) as u64);
            }),
            _ => {
                by_int!(ty, T => |d, a, b, m| map2::<T, T, T>(d, a, b, m, |x, y| T::wrap((x.wide() * y.wide()) >> T::BITS)))
            }
        },
        "mul" => by_int!(ty, T => |d, a, b, m| map2::<T, T, T>(d, a, b, m, T::wrapping_mul)),
        "mul24" if !has("hi") => by_int!(ty, T => |d, a, b, m| map2::<T, T, T>(d, a, b, m, |x, y| {
            let shift = 128 - 24;
            let signed = <T as Int>::MIN < 0;
            let cut = |v: i128| if signed { (v << shift) >> shift } else { v & 0xff_ffff };
            T::wrap(cut(x.wide()) * cut(y.wide()))
        })),
        "div" => by_int!(ty, T => div_int::<T>),
        "rem" => by_int!(ty, T => rem_int::<T>),
        "min" => by_int!(ty, T => |d, a, b, m| map2::<T, T, T>(d, a, b, m, T::min)),
        "max" => by_int!(ty, T => |d, a, b, m| map2::<T, T, T>(d, a, b, m, T::max)),
        "and" => by_int!(ty, T => |d, a, b, m| map2::<T, T, T>(d, a, b, m, |x, y| x & y)),
        "or" => by_int!(ty, T => |d, a, b, m| map2::<T, T, T>(d, a, b, m, |x, y| x | y)),
        "xor" => by_int!(ty, T => |d, a, b, m| map2::<T, T, T>(d, a, b, m, |x, y| x ^ y)),
        "shl" => {
            by_int!(ty, T => |d, a, b, m| map2::<T, u32, T>(d, a, b, m, |x, y| if y >= T::BITS { 0 } else { x << y }))
        }
        "shr" => by_int!(ty, T => |d, a, b, m| map2::<T, u32, T>(d, a, b, m, |x, y| {
            if y < T::BITS { x >> y } else if x.wide() < 0 { !0 } else { 0 }
        })),
        _ => None,
    }
}

#[expect(clippy::too_many_lines, reason = "one `match` over the operations")]
pub fn ternary(op: &str, mods: &[&str], ty: Ty) -> Option<Fn3> {
    let r = rounding(mods);
    let has = |m: &str| mods.contains(&m);
    if is_float(ty) {
        if !known(mods, &["sat"]) {
            return None;
        }
        return match op {
            "fma" | "mad" => by_float!(ty, T => by_rounding!(r, R => |d, a, b, c, m| {
                map3::<T, T, T, T>(d, (a, b, c), m, |x, y, z| if R == RN { x.mul_add(y, z) } else { x.fma_r::<R>(y, z) });
            })),
            _ => None,
        };
    }
    match op {
        "mad" if has("wide") => match ty {
            Ty::U16 => Some(|d, a, b, c, m| {
                map3::<u16, u16, u32, u32>(d, (a, b, c), m, |x, y, z| {
                    (u32::from(x) * u32::from(y)).wrapping_add(z)
                });
            }),
            Ty::S16 => Some(|d, a, b, c, m| {
                map3::<i16, i16, i32, i32>(d, (a, b, c), m, |x, y, z| {
                    (i32::from(x) * i32::from(y)).wrapping_add(z)
                });
            }),
            Ty::U32 => Some(|d, a, b, c, m| {
                map3::<u32, u32, u64, u64>(d, (a, b, c), m, |x, y, z| {
                    (u64::from(x) * u64::from(y)).wrapping_add(z)
                });
            }),
            Ty::S32 => Some(|d, a, b, c, m| {
                map3::<i32, i32, i64, i64>(d, (a, b, c), m, |x, y, z| {
                    (i64::from(x) * i64::from(y)).wrapping_add(z)
                });
            }),
            _ => None,
        },
        "mad" if has("hi") => match ty {
            Ty::U64 => Some(|d, a, b, c, m| {
                map3::<u64, u64, u64, u64>(d, (a, b, c), m, |x, y, z| {
                    (((u128::from(x) * u128::from(y)) >> 64) as u64).wrapping_add(z)
                });
            }),
            _ => by_int!(ty, T => |d, a, b, c, m| {
                map3::<T, T, T, T>(d, (a, b, c), m, |x, y, z| T::wrap(((x.wide() * y.wide()) >> T::BITS) + z.wide()));
            }),
        },
        "mad" => by_int!(ty, T => |d, a, b, c, m| {
            map3::<T, T, T, T>(d, (a, b, c), m, |x, y, z| x.wrapping_mul(y).wrapping_add(z));
        }),
        "sad" => by_int!(ty, T => |d, a, b, c, m| {
            map3::<T, T, T, T>(d, (a, b, c), m, |x, y, z| T::wrap((x.wide() - y.wide()).abs() + z.wide()));
        }),
        "bfe" => match ty {
            Ty::U32 => Some(|d, a, b, c, m| {
                map3::<u32, u32, u32, u32>(d, (a, b, c), m, |x, p, n| {
                    bfe(u64::from(x), p, n, 32, false) as u32
                })
            }),
            Ty::S32 => Some(|d, a, b, c, m| {
                map3::<u32, u32, u32, i32>(d, (a, b, c), m, |x, p, n| {
                    bfe(u64::from(x), p, n, 32, true) as i32
                })
            }),
            Ty::U64 => Some(|d, a, b, c, m| {
                map3::<u64, u32, u32, u64>(d, (a, b, c), m, |x, p, n| bfe(x, p, n, 64, false))
            }),
            Ty::S64 => Some(|d, a, b, c, m| {
                map3::<u64, u32, u32, u64>(d, (a, b, c), m, |x, p, n| bfe(x, p, n, 64, true))
            }),
            _ => None,
        },
        "prmt" if mods.is_empty() => Some(|d, a, b, c, m| map3::<u32, u32, u32, u32>(d, (a, b, c), m, prmt)),
        "shf" => {
            let left = has("l");
            let wrap = has("wrap");
            Some(match (left, wrap) {
                (true, true) => |d, a, b, c, m| {
                    map3::<u32, u32, u32, u32>(d, (a, b, c), m, |lo, hi, n| funnel(lo, hi, n & 31, true))
                },
                (true, false) => |d, a, b, c, m| {
                    map3::<u32, u32, u32, u32>(d, (a, b, c), m, |lo, hi, n| funnel(lo, hi, n.min(32), true))
                },
                (false, true) => |d, a, b, c, m| {
                    map3::<u32, u32, u32, u32>(d, (a, b, c), m, |lo, hi, n| funnel(lo, hi, n & 31, false))
                },
                (false, false) => |d, a, b, c, m| {
                    map3::<u32, u32, u32, u32>(d, (a, b, c), m, |lo, hi, n| funnel(lo, hi, n.min(32), false))
                },
            })
        }
        "dp4a" => match ty {
            Ty::S32 => Some(|d, a, b, c, m| {
                map3::<u32, u32, i32, i32>(d, (a, b, c), m, |x, y, z| {
                    (0..4).fold(z, |s, i| {
                        s.wrapping_add(i32::from((x >> (8 * i)) as i8) * i32::from((y >> (8 * i)) as i8))
                    })
                });
            }),
            _ => Some(|d, a, b, c, m| {
                map3::<u32, u32, u32, u32>(d, (a, b, c), m, |x, y, z| {
                    (0..4).fold(z, |s, i| {
                        s.wrapping_add(u32::from((x >> (8 * i)) as u8) * u32::from((y >> (8 * i)) as u8))
                    })
                });
            }),
        },
        _ => None,
    }
}

/// `slct.type.s32|f32 d, a, b, c`: a where c >= 0, else b.
pub fn slct(selector: Ty) -> Option<Fn3> {
    match selector {
        Ty::S32 => Some(|d, a, b, c, m| {
            map3::<u64, u64, i32, u64>(d, (a, b, c), m, |x, y, z| if z >= 0 { x } else { y })
        }),
        Ty::F32 => Some(|d, a, b, c, m| {
            map3::<u64, u64, f32, u64>(d, (a, b, c), m, |x, y, z| if z >= 0.0 { x } else { y })
        }),
        _ => None,
    }
}

pub fn quaternary(op: &str, ty: Ty) -> Option<Fn4> {
    match (op, ty.size()) {
        ("lop3", 4) => Some(|d, a, b, c, t, m| {
            lanes(m, |l| {
                d[l].set(u64::from(lop3(
                    a[l].get() as u32,
                    b[l].get() as u32,
                    c[l].get() as u32,
                    t[l].get() as u32,
                )))
            });
        }),
        ("bfi", 4) => Some(|d, a, b, p, n, m| {
            lanes(m, |l| {
                d[l].set(bfi(
                    a[l].get() & 0xffff_ffff,
                    b[l].get() & 0xffff_ffff,
                    p[l].get() as u32,
                    n[l].get() as u32,
                    32,
                ))
            });
        }),
        ("bfi", 8) => Some(|d, a, b, p, n, m| {
            lanes(m, |l| d[l].set(bfi(a[l].get(), b[l].get(), p[l].get() as u32, n[l].get() as u32, 64)));
        }),
        _ => None,
    }
}

/// Returns `len` ones from bit `pos` on.
fn ones(pos: u32, len: u32) -> u32 {
    let mask = if len >= 32 { u64::from(u32::MAX) } else { (1u64 << len) - 1 };
    if pos >= 32 { 0 } else { (mask << pos) as u32 }
}

/// Returns the function that extends the low bits of a value by sign or zero.
fn szext(ty: Ty, wrap: bool) -> Option<Fn2> {
    fn low(x: u32, n: u32, signed: bool) -> u32 {
        match n {
            0 => 0,
            32.. => x,
            _ if signed => (((x << (32 - n)) as i32) >> (32 - n)) as u32,
            _ => x & ((1 << n) - 1),
        }
    }
    Some(match (ty, wrap) {
        (Ty::S32, true) => |d, a, b, m| map2::<u32, u32, i32>(d, a, b, m, |x, n| low(x, n & 31, true) as i32),
        (Ty::S32, false) => |d, a, b, m| map2::<u32, u32, i32>(d, a, b, m, |x, n| low(x, n, true) as i32),
        (_, true) => |d, a, b, m| map2::<u32, u32, u32>(d, a, b, m, |x, n| low(x, n & 31, false)),
        (_, false) => |d, a, b, m| map2::<u32, u32, u32>(d, a, b, m, |x, n| low(x, n, false)),
    })
}

fn bfe(x: u64, pos: u32, len: u32, bits: u32, signed: bool) -> u64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    if len == 0 {
        return 0;
    }
    let sign_at = (pos + len - 1).min(bits - 1);
    let sign = signed && (x >> sign_at) & 1 == 1;
    let mut v = if pos >= bits { 0 } else { x >> pos };
    let kept = len.min(bits.saturating_sub(pos));
    if kept < 64 {
        let mask = (1u64 << kept) - 1;
        v &= mask;
        if sign {
            v |= !mask;
        }
    }
    v
}

fn bfi(a: u64, b: u64, pos: u32, len: u32, bits: u32) -> u64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    if len == 0 || pos >= bits {
        return b;
    }
    let len = len.min(bits - pos);
    let mask = if len >= 64 { u64::MAX } else { (1u64 << len) - 1 } << pos;
    (b & !mask) | ((a << pos) & mask)
}

fn prmt(a: u32, b: u32, sel: u32) -> u32 {
    let bytes = (u64::from(b) << 32) | u64::from(a);
    (0..4).fold(0, |out, i| {
        let s = (sel >> (4 * i)) & 0xf;
        let byte = (bytes >> (8 * (s & 7))) as u8;
        let byte = if s & 8 != 0 { ((byte as i8) >> 7) as u8 } else { byte };
        out | (u32::from(byte) << (8 * i))
    })
}

fn funnel(lo: u32, hi: u32, n: u32, left: bool) -> u32 {
    let v = (u64::from(hi) << 32) | u64::from(lo);
    if left { ((v << n) >> 32) as u32 } else { (v >> n) as u32 }
}

fn lop3(a: u32, b: u32, c: u32, table: u32) -> u32 {
    (0..8).filter(|i| (table >> i) & 1 == 1).fold(0, |out, i| {
        let pick = |v: u32, bit: u32| if i & bit != 0 { v } else { !v };
        out | (pick(a, 4) & pick(b, 2) & pick(c, 1))
    })
}

pub fn compare_op(op: &str, ty: Ty) -> Option<FnCmp> {
    if is_float(ty) {
        return by_float!(ty, T => match op {
            "eq" => |a, b, m| compare::<T>(a, b, m, |x, y| x == y),
            "ne" => |a, b, m| compare::<T>(a, b, m, |x, y| x != y),
            "lt" => |a, b, m| compare::<T>(a, b, m, |x, y| x < y),
            "le" => |a, b, m| compare::<T>(a, b, m, |x, y| x <= y),
            "gt" => |a, b, m| compare::<T>(a, b, m, |x, y| x > y),
            "ge" => |a, b, m| compare::<T>(a, b, m, |x, y| x >= y),
            "equ" => |a, b, m| compare::<T>(a, b, m, |x, y| x == y || x.is_nan() || y.is_nan()),
            "neu" => |a, b, m| compare::<T>(a, b, m, |x, y| x != y),
            "ltu" => |a, b, m| compare::<T>(a, b, m, |x, y| x < y || x.is_nan() || y.is_nan()),
            "leu" => |a, b, m| compare::<T>(a, b, m, |x, y| x <= y || x.is_nan() || y.is_nan()),
            "gtu" => |a, b, m| compare::<T>(a, b, m, |x, y| x > y || x.is_nan() || y.is_nan()),
            "geu" => |a, b, m| compare::<T>(a, b, m, |x, y| x >= y || x.is_nan() || y.is_nan()),
            "num" => |a, b, m| compare::<T>(a, b, m, |x, y| !x.is_nan() && !y.is_nan()),
            "nan" => |a, b, m| compare::<T>(a, b, m, |x, y| x.is_nan() || y.is_nan()),
            _ => return None,
        });
    }
    by_int!(ty, T => match op {
        "eq" => |a, b, m| compare::<T>(a, b, m, |x, y| x == y),
        "ne" => |a, b, m| compare::<T>(a, b, m, |x, y| x != y),
        "lt" | "lo" => |a, b, m| compare::<T>(a, b, m, |x, y| x < y),
        "le" | "ls" => |a, b, m| compare::<T>(a, b, m, |x, y| x <= y),
        "gt" | "hi" => |a, b, m| compare::<T>(a, b, m, |x, y| x > y),
        "ge" | "hs" => |a, b, m| compare::<T>(a, b, m, |x, y| x >= y),
        _ => return None,
    })
}

fn cvt_ii<S: Int, D: Int>(d: &Row, a: &Row, m: u32) {
    map1::<S, D>(d, a, m, |v| D::wrap(v.wide()));
}

fn cvt_ii_sat<S: Int, D: Int>(d: &Row, a: &Row, m: u32) {
    map1::<S, D>(d, a, m, |v| D::wrap(v.wide().clamp(D::MIN, D::MAX)));
}

fn cvt_fi<D: Int, const WIDE: bool, const R: u8>(d: &Row, a: &Row, m: u32) {
    lanes(m, |l| {
        let raw = a[l].get();
        let v = if WIDE { f64::get(raw) } else { f64::from(f32::get(raw)) };
        let out = if v.is_nan() {
            if D::MAX > i128::from(u32::MAX) { D::wrap(1 << 63) } else { D::wrap(0) }
        } else {
            // `as` saturates, and i128 holds every integral double that the clamp keeps.
            D::wrap((integral::<R>(v) as i128).clamp(D::MIN, D::MAX))
        };
        d[l].set(out.put());
    });
}

fn cvt_if<S: Int, const WIDE: bool, const R: u8>(d: &Row, a: &Row, m: u32) {
    lanes(m, |l| {
        let v = S::get(a[l].get()).wide();
        // Splitting keeps both halves exact, so that the only rounding is the last one.
        let (hi, lo) = (((v >> 32) as f64) * 4294967296.0, (v & 0xffff_ffff) as f64);
        d[l].set(if WIDE {
            hi.add_r::<R>(lo).put()
        } else if R == RN {
            (v as f32).put()
        } else {
            // Rounding towards zero twice in the same direction is still directed.
            to_f32::<R>(hi.add_r::<R>(lo)).put()
        });
    });
}

/// Returns the conversion of `cvt`, for its types `dst` and `src` and its modifiers.
pub fn convert(mods: &[&str], dst: Ty, src: Ty) -> Option<Fn1> {
    let allowed = ["rni", "rzi", "rmi", "rpi", "rn", "rz", "rm", "rp", "sat", "ftz"];
    if mods.iter().any(|m| !allowed.contains(m)) {
        return None;
    }
    let r = rounding(mods);
    let sat = mods.contains(&"sat");
    let to_integral = mods.iter().any(|m| matches!(*m, "rni" | "rzi" | "rmi" | "rpi"));
    match (dst, src) {
        (Ty::F64, Ty::F32) if !sat => Some(|d, a, m| map1::<f32, f64>(d, a, m, f64::from)),
        (Ty::F32, Ty::F64) if !sat => {
            Some(by_rounding!(r, R => |d, a, m| map1::<f64, f32>(d, a, m, to_f32::<R>)))
        }
        (Ty::F32, Ty::F32) if to_integral => Some(
            by_rounding!(r, R => |d, a, m| map1::<f32, f32>(d, a, m, |v| integral::<R>(f64::from(v)) as f32)),
        ),
        (Ty::F64, Ty::F64) if to_integral => {
            Some(by_rounding!(r, R => |d, a, m| map1::<f64, f64>(d, a, m, integral::<R>)))
        }
        (Ty::F32 | Ty::F64, _) if dst == src && sat => saturate(dst),
        (Ty::F32 | Ty::F64, _) if dst == src => Some(|d, a, m| map1::<u64, u64>(d, a, m, |v| v)),
        (Ty::F32, Ty::F16) => Some(|d, a, m| map1::<u16, f32>(d, a, m, f16_to_f32)),
        (Ty::F16, Ty::F32) if r == RN && !sat => Some(|d, a, m| map1::<f32, u16>(d, a, m, f32_to_f16)),
        (Ty::F32, _) if !sat => by_rounding!(r, R => by_int!(src, S => cvt_if::<S, false, R> as Fn1)),
        (Ty::F64, _) if !sat => by_rounding!(r, R => by_int!(src, S => cvt_if::<S, true, R> as Fn1)),
        (_, Ty::F32) => by_rounding!(r, R => by_int!(dst, D => cvt_fi::<D, false, R> as Fn1)),
        (_, Ty::F64) => by_rounding!(r, R => by_int!(dst, D => cvt_fi::<D, true, R> as Fn1)),
        _ if sat => by_int!(src, S => by_int!(dst, D => cvt_ii_sat::<S, D> as Fn1)).flatten(),
        _ => by_int!(src, S => by_int!(dst, D => cvt_ii::<S, D> as Fn1)).flatten(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::new_row;
    use super::*;

    fn run1(f: Fn1, a: u64) -> u64 {
        let (d, x) = (new_row(), new_row());
        x[3].set(a);
        f(&d, &x, 1 << 3);
        d[3].get()
    }

    fn run2(f: Fn2, a: u64, b: u64) -> u64 {
        let (d, x, y) = (new_row(), new_row(), new_row());
        x[0].set(a);
        y[0].set(b);
        f(&d, &x, &y, 1);
        d[0].get()
    }

    #[test]
    fn integers() {
        assert_eq!(run2(binary("mul", &["hi"], Ty::U64).unwrap(), u64::MAX, u64::MAX), u64::MAX - 1);
        assert_eq!(run2(binary("mul", &["hi"], Ty::S32).unwrap(), -1i64 as u64, 5) as i32, -1);
        assert_eq!(run2(binary("mul", &["wide"], Ty::S32).unwrap(), -3i64 as u64, 5) as i64, -15);
        assert_eq!(run2(binary("shr", &[], Ty::S32).unwrap(), 0x8000_0000, 40) as u32, u32::MAX);
        assert_eq!(run2(binary("shl", &[], Ty::B32).unwrap(), 1, 32), 0);
        assert_eq!(
            run2(binary("div", &[], Ty::S64).unwrap(), i64::MIN as u64, -1i64 as u64),
            i64::MIN as u64
        );
        assert_eq!(prmt(0x3322_1100, 0x7766_5544, 0x7531), 0x7755_3311);
        assert_eq!(lop3(0xf0f0, 0xcccc, 0xaaaa, 0x96), 0xf0f0 ^ 0xcccc ^ 0xaaaa);
        assert_eq!(bfe(0xff00, 8, 8, 32, true) as u32, u32::MAX);
        assert_eq!(bfi(0xab, 0, 8, 8, 32), 0xab00);
        assert_eq!((ones(4, 8), ones(40, 1), ones(0, 32)), (0xff0, 0, u32::MAX));
        assert_eq!(funnel(0x8000_0000, 1, 4, true), 0x18);
    }

    #[test]
    fn conversions() {
        let neg = (-2.5f32).put();
        assert_eq!(run1(convert(&["rzi"], Ty::S32, Ty::F32).unwrap(), neg) as i32, -2);
        assert_eq!(run1(convert(&["rmi"], Ty::S32, Ty::F32).unwrap(), neg) as i32, -3);
        assert_eq!(run1(convert(&["rni"], Ty::S32, Ty::F32).unwrap(), neg) as i32, -2);
        assert_eq!(run1(convert(&["rzi"], Ty::U32, Ty::F32).unwrap(), neg), 0);
        assert_eq!(run1(convert(&["rn"], Ty::F32, Ty::U64).unwrap(), u64::MAX), (u64::MAX as f32).put());
        assert_eq!(run1(convert(&[], Ty::S64, Ty::S8).unwrap(), 0x80) as i64, -128);
        assert_eq!(run1(convert(&["sat"], Ty::U8, Ty::S32).unwrap(), 300), 255);
        assert!(convert(&["relu"], Ty::F32, Ty::F64).is_none());
    }
}
