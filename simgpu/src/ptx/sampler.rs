//! Texture units: from coordinates to texels, and filters between them.
//!
//! The rules are those of the CUDA programming guide's appendix on texture fetching.

use super::image::{Channel, Image};
use super::round::f16_to_f32;

/// Rule for coordinates outside a texture, by its number in `CUaddress_mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Wrap,
    Clamp,
    Mirror,
    Border,
}

impl Mode {
    pub fn new(number: u32) -> Option<Mode> {
        [Mode::Wrap, Mode::Clamp, Mode::Mirror, Mode::Border].get(number as usize).copied()
    }

    /// Returns the texel of `n` that an index selects, or `None` for the border's colour.
    fn place(self, i: i64, n: i64) -> Option<i64> {
        match self {
            Mode::Wrap => Some(i.rem_euclid(n)),
            Mode::Clamp => Some(i.clamp(0, n - 1)),
            Mode::Mirror => {
                let i = i.rem_euclid(2 * n);
                Some(if i < n { i } else { 2 * n - 1 - i })
            }
            Mode::Border => (0..n).contains(&i).then_some(i),
        }
    }
}

/// Properties of a texture, apart from its memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampler {
    pub modes: [Mode; 3],
    pub linear: bool,
    /// `true` if coordinates from 0 to 1 span the texture.
    pub normalized: bool,
    /// `true` if integers of 8 and 16 bits are read as fractions of their maximum.
    pub fractions: bool,
    pub srgb: bool,
    pub border: [f32; 4],
    /// `true` if the filter between levels is linear.
    pub between_levels: bool,
    pub bias: f32,
    /// Lowest and highest level that is read.
    pub levels: [f32; 2],
}

/// A texture: levels of decreasing size, at least one.
#[derive(Debug, Clone)]
pub struct Texture {
    pub levels: Vec<Image>,
    pub sampler: Sampler,
}

/// Coordinates of a fetch, in the order x, y, z.
#[derive(Debug, Clone, Copy)]
pub struct Point {
    pub at: [f64; 3],
    pub dims: usize,
    pub layer: Option<i64>,
    /// `true` if the coordinates are numbers of texels.
    pub whole: bool,
}

/// Steps of a weight between two texels.
const STEPS: f64 = 256.0;

/// Returns the point of a face at which a direction looks, and the face's number.
pub fn face(direction: [f64; 3]) -> ([f64; 3], i64) {
    let [x, y, z] = direction;
    let (ax, ay, az) = (x.abs(), y.abs(), z.abs());
    let (face, m, s, t) = if ax >= ay && ax >= az {
        if x >= 0.0 { (0, ax, -z, -y) } else { (1, ax, z, -y) }
    } else if ay >= az {
        if y >= 0.0 { (2, ay, x, z) } else { (3, ay, x, -z) }
    } else if z >= 0.0 {
        (4, az, x, -y)
    } else {
        (5, az, -x, -y)
    };
    ([(s / m + 1.0) / 2.0, (t / m + 1.0) / 2.0, 0.0], face)
}

fn linear_of_srgb(v: f32) -> f32 {
    if v <= 0.04045 { v / 12.92 } else { ((v + 0.055) / 1.055).powf(2.4) }
}

/// Mixes two values of four channels.
fn mix(a: [u32; 4], b: [u32; 4], weight: f32) -> [u32; 4] {
    std::array::from_fn(|c| ((1.0 - weight) * f32::from_bits(a[c]) + weight * f32::from_bits(b[c])).to_bits())
}

impl Texture {
    /// Returns `true` if a fetch returns floating-point numbers.
    pub fn is_float(&self) -> bool {
        match self.levels[0].format.channel {
            Channel::F16 | Channel::F32 => true,
            Channel::U32 | Channel::S32 => false,
            _ => self.sampler.fractions,
        }
    }

    /// Converts a channel from its bits in memory.
    fn value(&self, channel: usize, bits: u32) -> u32 {
        let fraction = |most: f32| {
            let v = bits as i32 as f32 / most;
            v.max(-1.0)
        };
        let v = match self.levels[0].format.channel {
            Channel::F16 => f16_to_f32(bits as u16),
            Channel::U8 if self.sampler.fractions => {
                let v = fraction(255.0);
                if self.sampler.srgb && channel < 3 { linear_of_srgb(v) } else { v }
            }
            Channel::S8 if self.sampler.fractions => fraction(127.0),
            Channel::U16 if self.sampler.fractions => fraction(65535.0),
            Channel::S16 if self.sampler.fractions => fraction(32767.0),
            _ => return bits,
        };
        v.to_bits()
    }

    fn border(&self) -> [u32; 4] {
        self.sampler.border.map(|v| if self.is_float() { v.to_bits() } else { v as i64 as u32 })
    }

    /// Returns a texel by its index in each direction, which may lie outside.
    fn texel<E>(
        &self,
        image: &Image,
        index: [i64; 3],
        point: &Point,
        read: &mut impl FnMut(&Image, [u64; 3]) -> Result<[u32; 4], E>,
    ) -> Result<[u32; 4], E> {
        let sizes = [image.width, image.height, image.depth];
        let mut at = [0; 3];
        for d in 0..point.dims {
            let mode = match self.sampler.modes[d] {
                // These two modes exist for normalized coordinates only.
                Mode::Wrap | Mode::Mirror if !self.sampler.normalized => Mode::Clamp,
                mode => mode,
            };
            match mode.place(index[d], sizes[d] as i64) {
                Some(i) => at[d] = i as u64,
                None => return Ok(self.border()),
            }
        }
        if let Some(layer) = point.layer {
            at[2] = layer.clamp(0, image.depth as i64 - 1) as u64;
        }
        let mut texel = read(image, at)?;
        for (channel, bits) in texel.iter_mut().enumerate().take(image.format.channels as usize) {
            *bits = self.value(channel, *bits);
        }
        Ok(texel)
    }

    /// Returns the coordinates in texels.
    fn scaled(&self, image: &Image, point: &Point) -> [f64; 3] {
        let sizes = [image.width, image.height, image.depth];
        let scale = self.sampler.normalized && !point.whole;
        std::array::from_fn(|d| if scale { point.at[d] * sizes[d] as f64 } else { point.at[d] })
    }

    fn level<E>(
        &self,
        image: &Image,
        point: &Point,
        read: &mut impl FnMut(&Image, [u64; 3]) -> Result<[u32; 4], E>,
    ) -> Result<[u32; 4], E> {
        let scaled = self.scaled(image, point);
        if !self.sampler.linear || point.whole || !self.is_float() {
            return self.texel(image, scaled.map(|v| v.floor() as i64), point, read);
        }
        // The fraction has eight bits.
        let fixed = scaled.map(|v| ((v - 0.5) * STEPS).round() as i64);
        let (first, part) = (fixed.map(|v| v >> 8), fixed.map(|v| (v & 255) as f32 / STEPS as f32));
        let mut sum = [0f32; 4];
        for corner in 0..1usize << point.dims {
            let (mut index, mut weight) = (first, 1f32);
            for d in 0..point.dims {
                let far = corner >> d & 1 == 1;
                index[d] += i64::from(far);
                weight *= if far { part[d] } else { 1.0 - part[d] };
            }
            if weight == 0.0 {
                continue;
            }
            let texel = self.texel(image, index, point, read)?;
            for (sum, bits) in sum.iter_mut().zip(texel) {
                *sum += weight * f32::from_bits(bits);
            }
        }
        Ok(sum.map(f32::to_bits))
    }

    /// Returns the level whose texels are as far apart as pixels, by the longer one of two steps.
    pub fn level_of(&self, steps: [[f32; 3]; 2]) -> f32 {
        let image = &self.levels[0];
        let sizes = [image.width, image.height, image.depth].map(|n| n as f32);
        let scale = |d: usize| if self.sampler.normalized { sizes[d] } else { 1.0 };
        let [right, down] =
            steps.map(|step| (0..3).map(|d| (step[d] * scale(d)).powi(2)).sum::<f32>().sqrt());
        right.max(down).log2()
    }

    /// Fetches at a point; `read` returns the channels of a texel inside a level.
    pub fn fetch<E>(
        &self,
        point: &Point,
        level: f32,
        mut read: impl FnMut(&Image, [u64; 3]) -> Result<[u32; 4], E>,
    ) -> Result<[u32; 4], E> {
        let [least, most] = self.sampler.levels;
        let last = self.levels.len() - 1;
        // `max` and `min` also replace what is no number.
        let level = (level + self.sampler.bias).min(most).max(least).min(last as f32).max(0.0);
        let below = if self.sampler.between_levels { level.floor() } else { level.round() };
        let image = &self.levels[below as usize];
        let texel = self.level(image, point, &mut read)?;
        let part = ((f64::from(level - below) * STEPS).round() / STEPS) as f32;
        match self.levels.get(below as usize + 1) {
            Some(next) if self.sampler.between_levels && part > 0.0 && self.is_float() => {
                Ok(mix(texel, self.level(next, point, &mut read)?, part))
            }
            _ => Ok(texel),
        }
    }

    /// Returns one channel of the four texels around a point.
    pub fn gather<E>(
        &self,
        point: &Point,
        channel: usize,
        mut read: impl FnMut(&Image, [u64; 3]) -> Result<[u32; 4], E>,
    ) -> Result<[u32; 4], E> {
        let image = &self.levels[0];
        let [x, y, _] = self.scaled(image, point).map(|v| (v - 0.5).floor() as i64);
        let mut four = [0; 4];
        for (to, (dx, dy)) in four.iter_mut().zip([(0, 1), (1, 1), (1, 0), (0, 0)]) {
            let index = [x.saturating_add(dx), y.saturating_add(dy), 0];
            *to = self.texel(image, index, point, &mut read)?[channel];
        }
        Ok(four)
    }
}

#[cfg(test)]
mod tests {
    use super::super::image::Format;
    use super::*;
    use std::convert::Infallible;

    fn texture(channel: u32, extent: [u64; 3], modes: [Mode; 3], linear: bool, normalized: bool) -> Texture {
        let image = Image::packed(Format::new(channel, 1).unwrap(), extent, false).unwrap();
        let sampler = Sampler {
            modes,
            linear,
            normalized,
            fractions: true,
            srgb: false,
            border: [9.0, 0.0, 0.0, 0.0],
            between_levels: false,
            bias: 0.0,
            levels: [0.0, 0.0],
        };
        Texture { levels: vec![image], sampler }
    }

    fn point(at: &[f64], whole: bool) -> Point {
        let mut full = [0.0; 3];
        full[..at.len()].copy_from_slice(at);
        Point { at: full, dims: at.len(), layer: None, whole }
    }

    /// Fetches from a texture of floats whose texel at x, y, z is x + 10 y + 100 z.
    fn fetch(t: &Texture, at: &[f64]) -> f32 {
        let read = |image: &Image, [x, y, z]: [u64; 3]| -> Result<[u32; 4], Infallible> {
            assert!(x < image.width && y < image.height && z < image.depth);
            Ok([((x + 10 * y + 100 * z) as f32).to_bits(), 0, 0, 0])
        };
        f32::from_bits(t.fetch(&point(at, false), 0.0, read).unwrap()[0])
    }

    #[test]
    fn modes_select_texels() {
        for (mode, expected) in [
            (Mode::Wrap, [Some(3), Some(0), Some(1), Some(3)]),
            (Mode::Clamp, [Some(0), Some(3), Some(3), Some(3)]),
            (Mode::Mirror, [Some(0), Some(3), Some(2), Some(0)]),
            (Mode::Border, [None, None, None, None]),
        ] {
            assert_eq!([-1, 4, 5, 7].map(|i| mode.place(i, 4)), expected);
            assert_eq!(mode.place(2, 4), Some(2));
            let _ = (mode.place(i64::MAX, 4), mode.place(i64::MIN, 4));
        }
    }

    #[test]
    fn points_and_lines() {
        let clamp = texture(0x20, [4, 3, 2], [Mode::Clamp; 3], false, false);
        assert_eq!(fetch(&clamp, &[2.9, 1.0, 1.5]), 112.0);
        assert_eq!(fetch(&clamp, &[-7.0, 1e30, f64::NAN]), 20.0);
        let linear = texture(0x20, [4, 3, 2], [Mode::Clamp; 3], true, false);
        assert_eq!(fetch(&linear, &[2.0, 1.5, 1.0]), 61.5);
        assert_eq!(fetch(&linear, &[0.25, 0.5, 0.5]), 0.0);
        // A third becomes 85 of 256 parts.
        assert_eq!(fetch(&linear, &[0.5 + 1.0 / 3.0]), 85.0 / 256.0);
        let border = texture(0x20, [4, 1, 1], [Mode::Border; 3], true, false);
        assert_eq!((fetch(&border, &[0.0]), fetch(&border, &[-3.0])), (4.5, 9.0));
    }

    #[test]
    fn normalized_coordinates_repeat() {
        let wrap = texture(0x20, [4, 1, 1], [Mode::Wrap; 3], false, true);
        assert_eq!([0.3, 1.3, -0.7, 5.99].map(|x| fetch(&wrap, &[x])), [1.0, 1.0, 1.0, 3.0]);
        let mirror = texture(0x20, [4, 1, 1], [Mode::Mirror; 3], false, true);
        assert_eq!([0.3, 1.3, -0.3, 2.3].map(|x| fetch(&mirror, &[x])), [1.0, 2.0, 1.0, 1.0]);
        // Between the last texel and the first.
        let linear = texture(0x20, [4, 1, 1], [Mode::Wrap; 3], true, true);
        assert_eq!(fetch(&linear, &[1.0]), 1.5);
        // Without normalized coordinates, wrapping is clamping.
        let plain = texture(0x20, [4, 1, 1], [Mode::Wrap; 3], false, false);
        assert_eq!(fetch(&plain, &[5.0]), 3.0);
    }

    #[test]
    fn integers_become_fractions() {
        let read = |v: u32| move |_: &Image, _: [u64; 3]| Ok::<_, Infallible>([v, 0, 0, 0]);
        let at = point(&[0.0], true);
        for (channel, bits, expected) in [
            (0x01, 255, 1.0),
            (0x01, 51, 0.2),
            (0x08, -128i32 as u32, -1.0),
            (0x08, 127, 1.0),
            (0x02, 65535, 1.0),
            (0x09, -32767i32 as u32, -1.0),
            (0x10, 0xbe00, -1.5),
        ] {
            let mut t = texture(channel, [4, 1, 1], [Mode::Clamp; 3], false, false);
            assert_eq!(t.fetch(&at, 0.0, read(bits)).unwrap()[0], f32::to_bits(expected));
            t.sampler.fractions = false;
            let raw = if channel == 0x10 { f32::to_bits(expected) } else { bits };
            assert_eq!(t.fetch(&at, 0.0, read(bits)).unwrap()[0], raw);
        }
    }

    #[test]
    fn levels_mix() {
        let mut t = texture(0x20, [4, 4, 1], [Mode::Clamp; 3], false, true);
        t.levels = (0..3)
            .map(|level| Image {
                base: level,
                ..Image::packed(t.levels[0].format, [4 >> level, 4 >> level, 1], false).unwrap()
            })
            .collect();
        t.sampler.levels = [0.0, 1.5];
        let at = point(&[0.5, 0.5], false);
        let read = |image: &Image, _: [u64; 3]| Ok::<_, Infallible>([(image.base as f32).to_bits(), 0, 0, 0]);
        let fetch = |t: &Texture, level| f32::from_bits(t.fetch(&at, level, read).unwrap()[0]);
        assert_eq!([0.4, 0.6, 9.0, f32::NAN].map(|level| fetch(&t, level)), [0.0, 1.0, 2.0, 2.0]);
        // Steps of a texel, of two, and of none.
        let level_of = |step| t.level_of([[step, 0.0, 0.0], [0.0, step / 2.0, 0.0]]);
        assert_eq!([0.25, 0.5, 0.0].map(|step| fetch(&t, level_of(step))), [0.0, 1.0, 0.0]);
        t.sampler.between_levels = true;
        assert_eq!([0.0, 0.25, 9.0, -1.0].map(|level| fetch(&t, level)), [0.0, 0.25, 1.5, 0.0]);
    }

    #[test]
    fn four_texels_and_faces() {
        let t = texture(0x20, [4, 3, 1], [Mode::Clamp; 3], true, false);
        let read = |_: &Image, [x, y, _]: [u64; 3]| Ok::<_, Infallible>([0, (x + 10 * y) as u32, 0, 0]);
        assert_eq!(t.gather(&point(&[2.0, 1.0], false), 1, read).unwrap(), [11, 12, 2, 1]);
        assert_eq!(face([2.0, 1.0, -1.0]), ([0.75, 0.25, 0.0], 0));
        assert_eq!((face([0.0, -3.0, 0.0]).1, face([0.1, 0.2, -1.0]).1), (3, 5));
    }
}
