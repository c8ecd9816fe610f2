//! Elements of arrays, textures and surfaces: their format, and their place in device memory.

use super::ast::Ty;

/// Type of one channel, by its number in `CUarray_format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Channel {
    U8 = 0x01,
    U16 = 0x02,
    U32 = 0x03,
    S8 = 0x08,
    S16 = 0x09,
    S32 = 0x0a,
    F16 = 0x10,
    F32 = 0x20,
}

impl Channel {
    const ALL: [Channel; 8] = {
        use Channel::*;
        [U8, U16, U32, S8, S16, S32, F16, F32]
    };

    /// Returns the type in memory; the bits of half precision have no type of their own.
    pub fn ty(self) -> Ty {
        match self {
            Channel::U8 => Ty::U8,
            Channel::S8 => Ty::S8,
            Channel::U16 | Channel::F16 => Ty::U16,
            Channel::S16 => Ty::S16,
            Channel::U32 | Channel::F32 => Ty::U32,
            Channel::S32 => Ty::S32,
        }
    }
}

/// Format of an element: one, two or four channels of a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Format {
    pub channel: Channel,
    pub channels: u32,
}

impl Format {
    /// Returns the format with the numbers of `CUDA_ARRAY_DESCRIPTOR`, if it is simulated.
    pub fn new(channel: u32, channels: u32) -> Option<Format> {
        let channel = Channel::ALL.into_iter().find(|known| *known as u32 == channel)?;
        matches!(channels, 1 | 2 | 4).then_some(Format { channel, channels })
    }

    /// Returns the bytes of an element.
    pub fn bytes(self) -> u64 {
        u64::from(self.channel.ty().size() * self.channels)
    }
}

/// Elements in device memory, row by row. Layers count as depth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Image {
    pub base: u64,
    /// Elements in each direction, at least one.
    pub width: u64,
    pub height: u64,
    pub depth: u64,
    /// Bytes from row to row.
    pub pitch: u64,
    pub format: Format,
    pub layered: bool,
}

impl Image {
    /// Returns an image without gaps between its rows.
    pub fn packed(format: Format, extent: [u64; 3], layered: bool) -> Option<Image> {
        let [width, height, depth] = extent;
        let pitch = width.checked_mul(format.bytes())?;
        Some(Image { base: 0, width, height, depth, pitch, format, layered })
    }

    /// Returns the bytes of a row's elements.
    pub fn row(&self) -> u64 {
        self.width * self.format.bytes()
    }

    /// Returns the bytes from slice to slice, or from layer to layer.
    pub fn slice(&self) -> u64 {
        self.pitch * self.height
    }

    /// Returns the bytes of all rows; `None` if the number is too large.
    pub fn bytes(&self) -> Option<u64> {
        self.pitch.checked_mul(self.height)?.checked_mul(self.depth)
    }

    /// Returns the offset of a box of `extent` (bytes, rows, slices) at `at`, if it lies inside.
    pub fn offset(&self, at: [u64; 3], extent: [u64; 3]) -> Option<u64> {
        let room = [self.row(), self.height, self.depth];
        let inside = (0..3).all(|i| at[i].checked_add(extent[i]).is_some_and(|end| end <= room[i]));
        inside.then(|| at[0] + at[1] * self.pitch + at[2] * self.slice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_outside_an_image_have_no_offset() {
        let format = Format::new(0x20, 2).unwrap();
        let image = Image::packed(format, [4, 3, 2], false).unwrap();
        assert_eq!((image.row(), image.slice(), image.bytes()), (32, 96, Some(192)));
        assert_eq!(image.offset([8, 1, 1], [24, 2, 1]), Some(136));
        for (at, extent) in [([8, 0, 0], [32, 1, 1]), ([0, 2, 0], [8, 2, 1]), ([0, 0, u64::MAX], [8, 1, 2])] {
            assert_eq!(image.offset(at, extent), None);
        }
    }

    #[test]
    fn formats_and_sizes_are_bounded() {
        assert_eq!(Format::new(0x10, 4).unwrap().bytes(), 8);
        assert!(Format::new(0x20, 3).is_none() && Format::new(0xb0, 1).is_none());
        let format = Format::new(0x20, 4).unwrap();
        assert!(Image::packed(format, [u64::MAX, 1, 1], false).is_none());
        assert!(Image::packed(format, [1 << 40, 1 << 30, 1], false).unwrap().bytes().is_none());
    }
}
