//! Directed rounding and half precision, built from exact residuals.

pub const RN: u8 = 0;
pub const RZ: u8 = 1;
pub const RM: u8 = 2;
pub const RP: u8 = 3;

/// Adjusts a result rounded to nearest to mode `R`, given the sign of (exact - result).
fn direct64<const R: u8>(r: f64, residual: f64) -> f64 {
    if R == RN || residual == 0.0 || r.is_nan() || residual.is_nan() {
        return r;
    }
    let down = match R {
        RZ => r > 0.0 || (r == 0.0 && residual > 0.0),
        RM => true,
        _ => false,
    };
    if down && residual < 0.0 {
        r.next_down()
    } else if !down && residual > 0.0 {
        r.next_up()
    } else {
        r
    }
}

/// Rounds the exact value `hi + lo` to single precision.
fn narrow<const R: u8>(hi: f64, lo: f64) -> f32 {
    let r = hi as f32;
    if R == RN || hi.is_nan() || hi.is_infinite() {
        return r;
    }
    let residual = if r.is_infinite() { -f64::from(r) } else { (hi - f64::from(r)) + lo };
    let down = match R {
        RZ => r > 0.0,
        RM => true,
        _ => false,
    };
    if down && residual < 0.0 {
        r.next_down()
    } else if !down && residual > 0.0 {
        r.next_up()
    } else {
        r
    }
}

fn sum_error(a: f64, b: f64, s: f64) -> f64 {
    let bb = s - a;
    (a - (s - bb)) + (b - bb)
}

/// Arithmetic of one precision under rounding mode `R`.
pub trait Directed: Sized {
    fn add_r<const R: u8>(self, b: Self) -> Self;
    fn mul_r<const R: u8>(self, b: Self) -> Self;
    fn div_r<const R: u8>(self, b: Self) -> Self;
    fn fma_r<const R: u8>(self, b: Self, c: Self) -> Self;
    fn sqrt_r<const R: u8>(self) -> Self;
}

impl Directed for f64 {
    fn add_r<const R: u8>(self, b: f64) -> f64 {
        let s = self + b;
        direct64::<R>(s, sum_error(self, b, s))
    }
    fn mul_r<const R: u8>(self, b: f64) -> f64 {
        let p = self * b;
        direct64::<R>(p, self.mul_add(b, -p))
    }
    fn div_r<const R: u8>(self, b: f64) -> f64 {
        let q = self / b;
        direct64::<R>(q, (-q).mul_add(b, self) * b.signum())
    }
    fn fma_r<const R: u8>(self, b: f64, c: f64) -> f64 {
        let r = self.mul_add(b, c);
        let p = self * b;
        let e = self.mul_add(b, -p);
        let s = p + c;
        direct64::<R>(r, (s - r) + (sum_error(p, c, s) + e))
    }
    fn sqrt_r<const R: u8>(self) -> f64 {
        let r = self.sqrt();
        direct64::<R>(r, (-r).mul_add(r, self))
    }
}

impl Directed for f32 {
    fn add_r<const R: u8>(self, b: f32) -> f32 {
        let (x, y) = (f64::from(self), f64::from(b));
        let s = x + y;
        narrow::<R>(s, sum_error(x, y, s))
    }
    fn mul_r<const R: u8>(self, b: f32) -> f32 {
        narrow::<R>(f64::from(self) * f64::from(b), 0.0)
    }
    fn div_r<const R: u8>(self, b: f32) -> f32 {
        let (x, y) = (f64::from(self), f64::from(b));
        let q = x / y;
        narrow::<R>(q, (-q).mul_add(y, x) * y.signum())
    }
    fn fma_r<const R: u8>(self, b: f32, c: f32) -> f32 {
        let (p, z) = (f64::from(self) * f64::from(b), f64::from(c));
        let s = p + z;
        narrow::<R>(s, sum_error(p, z, s))
    }
    fn sqrt_r<const R: u8>(self) -> f32 {
        let x = f64::from(self);
        let r = x.sqrt();
        narrow::<R>(r, (-r).mul_add(r, x))
    }
}

/// Rounds a double to single precision.
pub fn to_f32<const R: u8>(v: f64) -> f32 {
    narrow::<R>(v, 0.0)
}

/// Rounds to an integral value (`.rni`, `.rzi`, `.rmi`, `.rpi`).
pub fn integral<const R: u8>(v: f64) -> f64 {
    match R {
        RN => v.round_ties_even(),
        RZ => v.trunc(),
        RM => v.floor(),
        _ => v.ceil(),
    }
}

/// Converts half precision to single precision.
pub fn f16_to_f32(h: u16) -> f32 {
    let sign = u32::from(h >> 15) << 31;
    let (exp, frac) = (u32::from(h >> 10) & 31, u32::from(h) & 0x3ff);
    match exp {
        0 => {
            let v = frac as f32 * 2f32.powi(-24);
            f32::from_bits(v.to_bits() | sign)
        }
        31 => f32::from_bits(sign | 0x7f80_0000 | (frac << 13)),
        _ => f32::from_bits(sign | ((exp + 112) << 23) | (frac << 13)),
    }
}

/// Converts single precision to half precision, rounding to nearest even.
pub fn f32_to_f16(v: f32) -> u16 {
    let bits = v.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    if v.is_nan() {
        return 0x7fff;
    }
    let a = v.abs();
    if a >= 65520.0 {
        return sign | 0x7c00;
    }
    if a < 2f32.powi(-14) {
        let scaled = (a * 2f32.powi(24)).round_ties_even() as u16;
        return sign | scaled;
    }
    let exp = ((a.to_bits() >> 23) as i32) - 127;
    let scaled = (a * 2f32.powi(10 - exp)).round_ties_even() as u32;
    sign | (((exp + 14) << 10) as u32 + scaled) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directed_modes_bracket_the_exact_value() {
        let third_down = 1f32.div_r::<RM>(3.0);
        let third_up = 1f32.div_r::<RP>(3.0);
        assert!(third_down < third_up && third_down.next_up() == third_up);
        assert_eq!(1f64.add_r::<RP>(1e-30), 1f64.next_up());
        assert_eq!(1f64.add_r::<RZ>(-1e-30), 1f64.next_down());
        assert_eq!(f32::MAX.mul_r::<RZ>(2.0), f32::MAX);
        assert_eq!(to_f32::<RZ>(1.0 + 1e-9), 1.0);
        assert_eq!(0.1f32.fma_r::<RN>(0.2, 0.3), 0.1f32.mul_add(0.2, 0.3));
    }

    #[test]
    fn halves_round_trip() {
        for h in 0..=0x7c00u16 {
            assert_eq!(f32_to_f16(f16_to_f32(h)), h);
        }
        assert_eq!(f32_to_f16(-1.5), 0xbe00);
    }
}
