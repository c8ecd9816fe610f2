//! Arrays: whether a copy from one can be enqueued without the driver's answer.

use gpusession_proto::frame::op;

use crate::client::{Client, string};
use crate::cuboid::Cuboid;
use crate::status::{NOT_SUPPORTED, Result};

/// Words of `CUDA_ARRAY3D_DESCRIPTOR`.
const DESCRIPTOR: usize = 5;
/// `CUDA_ARRAY3D_LAYERED`, `_SURFACE_LDST`, `_CUBEMAP`, `_TEXTURE_GATHER` and `_COLOR_ATTACHMENT`:
/// arrays whose memory is there from the start.
const ORDINARY: u64 = 0x01 | 0x02 | 0x04 | 0x08 | 0x20;

/// Shape of an array of a plain format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    /// Elements of a row, rows and layers; at least 1 each.
    size: [usize; 3],
    /// Bytes of an element.
    element: usize,
    /// Whether the array's memory is there.
    present: bool,
}

impl Shape {
    /// Reads a descriptor; `None` if it is none, or the format no plain one.
    fn read(descriptor: &[u8]) -> Option<Self> {
        let mut words = [0; DESCRIPTOR];
        if descriptor.len() != 8 * DESCRIPTOR {
            return None;
        }
        for (word, bytes) in words.iter_mut().zip(descriptor.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().ok()?);
        }
        let [width, height, depth, format, flags] = words;
        // `CU_AD_FORMAT_*` of integers of 8 to 32 bits, half and single precision.
        // Normalized integers of 8 and 16 bits name their number of channels, too.
        let channel = match format as u32 {
            0x01 | 0x08 | 0xc0..=0xc2 | 0xc6..=0xc8 => 1,
            0x02 | 0x09 | 0x10 | 0xc3..=0xc5 | 0xc9..=0xcb => 2,
            0x03 | 0x0a | 0x20 => 4,
            _ => return None,
        };
        let element = channel * (format >> 32) as usize;
        let size = [width, height, depth].map(|n| n.max(1) as usize);
        (element > 0).then_some(Self { size, element, present: flags & !ORDINARY == 0 })
    }

    /// Returns `true` if the driver accepts a copy of this part: first byte, row and layer, each
    /// with the number of them.
    fn contains(&self, part: [(usize, usize); 3]) -> bool {
        let [width, height, depth] = self.size;
        let most = [width.saturating_mul(self.element), height, depth];
        let (x, bytes) = part[0];
        let inside = |((first, count), most): (&(usize, usize), &usize)| {
            first.checked_add(*count).is_some_and(|end| end <= *most)
        };
        self.present
            && x.is_multiple_of(self.element)
            && bytes.is_multiple_of(self.element)
            && part.iter().zip(&most).all(inside)
    }
}

/// Returns the bytes of an element of an array.
pub fn element(client: &Client, array: u64) -> Result<usize> {
    let reply = client.call(op::cuArray3DGetDescriptor_v2, |w| w.word(client.own(array)))?;
    let mut r = reply.reader();
    Shape::read(string(&mut r)?).map(|shape| shape.element).ok_or(NOT_SUPPORTED)
}

/// Returns `true` if the source of a copy is an array that has the box.
///
/// The worker describes the array each time, since its name may be another array's by now. A late
/// error stays for the caller.
pub fn contains_source(client: &Client, copy: &Cuboid) -> bool {
    let Some((array, part)) = copy.array_source() else { return false };
    let reply = client.ask(op::cuArray3DGetDescriptor_v2, |w| w.word(client.own(array)));
    reply.is_ok_and(|reply| {
        let descriptor = reply.reader().bytes().ok().filter(|_| reply.status == 0).and_then(Shape::read);
        descriptor.is_some_and(|shape| shape.contains(part))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO_FLOATS: u64 = 0x20 | 2 << 32;

    fn shape(words: [u64; DESCRIPTOR]) -> Option<Shape> {
        Shape::read(&words.map(u64::to_le_bytes).concat())
    }

    #[test]
    fn part_is_inside_its_array_in_whole_elements() {
        let shape = shape([10, 6, 3, TWO_FLOATS, 0x02]).unwrap();
        assert_eq!((shape.size, shape.element), ([10, 6, 3], 8));
        assert!(shape.contains([(0, 80), (0, 6), (0, 3)]) && shape.contains([(72, 8), (5, 1), (2, 1)]));
        for part in [
            [(0, 81), (0, 1), (0, 1)],
            [(80, 8), (0, 1), (0, 1)],
            [(4, 8), (0, 1), (0, 1)],
            [(0, 4), (0, 1), (0, 1)],
            [(0, 8), (6, 1), (0, 1)],
            [(0, 8), (0, 7), (0, 1)],
            [(0, 8), (0, 1), (1, 3)],
            [(usize::MAX - 7, 16), (0, 1), (0, 1)],
        ] {
            assert!(!shape.contains(part), "{part:?}");
        }
    }

    #[test]
    fn element_of_normalized_integers_has_all_channels() {
        for (format, channels, bytes) in
            [(0xc0, 1, 1), (0xc2, 4, 4), (0xc5, 4, 8), (0xc7, 2, 2), (0xca, 2, 4)]
        {
            assert_eq!(shape([8, 8, 0, format | channels << 32, 0]).map(|s| s.element), Some(bytes));
        }
    }

    #[test]
    fn missing_dimension_is_one_row() {
        let shape = shape([64, 0, 0, 0x01 | 1 << 32, 0]).unwrap();
        assert!(shape.contains([(0, 64), (0, 1), (0, 1)]) && !shape.contains([(0, 64), (0, 2), (0, 1)]));
    }

    #[test]
    fn other_formats_and_arrays_without_memory_are_left_to_the_driver() {
        const COMPRESSED: u64 = 0x91 | 4 << 32;
        const SPARSE: u64 = 0x40;
        const DEFERRED: u64 = 0x80;
        assert_eq!(shape([64, 64, 0, COMPRESSED, 0]), None);
        for flags in [SPARSE, DEFERRED, SPARSE | 1, 0x10] {
            let shape = shape([64, 64, 0, TWO_FLOATS, flags]).unwrap();
            assert!(!shape.contains([(0, 8), (0, 1), (0, 1)]), "{flags:#x}");
        }
        assert_eq!(shape([64, 64, 0, 0x20, 0]), None, "no channels");
        assert_eq!(Shape::read(&[0; 39]), None);
    }
}
