//! Options of the driver's compiler and linker, with the program's buffers for the logs.

use std::ffi::{c_char, c_void};

use gpusession_link::Reply;
use gpusession_proto::frame::{Reader, Writer};

use crate::client::string;
use crate::entry::{INVALID_VALUE, Result, give_optional, give_text};

/// `CU_JIT_*` options whose value is a pointer.
///
/// The reply fills the log buffers; the worker does not get these options.
const WALL_TIME: i32 = 2;
const INFO_LOG: i32 = 3;
const INFO_SIZE: i32 = 4;
const ERROR_LOG: i32 = 5;
const ERROR_SIZE: i32 = 6;
const LEFT_OUT: &[i32] = &[INFO_LOG, ERROR_LOG, 17, 18];
/// Options that the driver writes, in the order of a reply's words.
const OUTPUTS: [i32; 3] = [INFO_SIZE, ERROR_SIZE, WALL_TIME];

/// Options of a load or a link.
pub struct Options {
    pairs: Vec<(i32, u64)>,
    info: *mut c_char,
    info_size: usize,
    error: *mut c_char,
    error_size: usize,
    /// Where the program reads the values of [`OUTPUTS`], or null.
    outputs: [*mut u32; OUTPUTS.len()],
}

impl Options {
    /// Reads the program's two arrays.
    pub fn read(count: u32, keys: *const i32, values: *const *mut c_void) -> Result<Self> {
        let mut options = Self {
            pairs: Vec::new(),
            info: std::ptr::null_mut(),
            info_size: 0,
            error: std::ptr::null_mut(),
            error_size: 0,
            outputs: [std::ptr::null_mut(); OUTPUTS.len()],
        };
        if count > 0 && keys.is_null() {
            return Err(INVALID_VALUE);
        }
        for i in 0..count as usize {
            // SAFETY: by the call's contract both arrays have `count` elements; `keys` is not null,
            // and null `values` are not read.
            let (key, value) = unsafe {
                (
                    keys.add(i).read(),
                    if values.is_null() { std::ptr::null_mut() } else { values.add(i).read() },
                )
            };
            match key {
                INFO_LOG => options.info = value.cast(),
                ERROR_LOG => options.error = value.cast(),
                INFO_SIZE => options.info_size = value as usize & 0xffff_ffff,
                ERROR_SIZE => options.error_size = value as usize & 0xffff_ffff,
                _ => {}
            }
            if let Some(output) = OUTPUTS.iter().position(|output| *output == key)
                && !values.is_null()
            {
                // The driver writes the low half of the pointer in the array.
                options.outputs[output] = values.wrapping_add(i).cast_mut().cast();
            }
            if !LEFT_OUT.contains(&key) {
                options.pairs.push((key, value as u64));
            }
        }
        Ok(options)
    }

    /// Writes the options for the worker.
    pub fn write(&self, w: &mut Writer<'_>) {
        w.word(self.pairs.len() as u64);
        for (key, value) in &self.pairs {
            w.word(*key as u32 as u64);
            w.word(*value);
        }
    }

    /// Copies the two logs at the start of a reply to the program's buffers; returns the rest.
    pub fn logs<'a>(&self, reply: &'a Reply) -> Result<Reader<'a>> {
        let mut r = reply.reader();
        for (buffer, size) in [(self.info, self.info_size), (self.error, self.error_size)] {
            let text = string(&mut r)?;
            if !buffer.is_null() && size > 0 {
                give_text(buffer, size.min(i32::MAX as usize) as i32, text)?;
            }
        }
        Ok(r)
    }

    /// Empties the logs and sets what the driver returns to 0, as a linker's creation does.
    pub fn begin(&self) -> Result {
        for (buffer, size) in [(self.info, self.info_size), (self.error, self.error_size)] {
            if !buffer.is_null() && size > 0 {
                give_text(buffer, size.min(i32::MAX as usize) as i32, b"")?;
            }
        }
        self.outputs.into_iter().for_each(|output| give_optional(output, 0));
        Ok(())
    }

    /// Writes the values of options that the driver returns into the program's array.
    ///
    /// Older workers do not answer them. Returns the rest of the reply.
    pub fn give_outputs<'a>(&self, mut r: Reader<'a>) -> Reader<'a> {
        for output in self.outputs {
            let Ok(value) = r.word() else { return r };
            give_optional(output, value as u32);
        }
        r
    }
}

#[cfg(test)]
mod tests {
    use gpusession_proto::frame::{HEADER, Header};

    use super::*;

    #[test]
    fn options_with_pointers_stay_in_the_program() {
        const MAX_REGISTERS: i32 = 0;
        let mut log = [0 as c_char; 16];
        let keys = [MAX_REGISTERS, INFO_LOG, INFO_SIZE, WALL_TIME, ERROR_SIZE];
        // A size comes in the pointer's place; the program sets its low half only.
        let high = 0xdead_0000_0000_0000_u64 as usize;
        let size = (high | log.len()) as *mut c_void;
        let values =
            [32 as *mut c_void, log.as_mut_ptr().cast(), size, 5 as *mut c_void, high as *mut c_void];
        let options = Options::read(5, keys.as_ptr(), values.as_ptr()).unwrap();
        assert_eq!((options.info, options.info_size), (log.as_mut_ptr(), 16));
        assert_eq!((options.error, options.error_size), (std::ptr::null_mut(), 0));
        let mut frame = Vec::new();
        let mut w = Writer::new(&mut frame, &Header::empty());
        options.write(&mut w);
        w.finish();
        let mut r = Reader::new(&frame[HEADER..]);
        let mut words = [0; 9];
        words.iter_mut().for_each(|word| *word = r.word().unwrap());
        let sizes = [INFO_SIZE as u64, size as u64, ERROR_SIZE as u64, high as u64];
        let time = [WALL_TIME as u64, 5];
        assert_eq!(words, [&[4, MAX_REGISTERS as u64, 32], &sizes[..2], &time, &sizes[2..]].concat()[..]);
        assert!(r.is_empty(), "no address of the program goes to the worker");
    }

    #[test]
    fn outputs_go_to_the_places_of_their_options() {
        let keys = [WALL_TIME, 0, INFO_SIZE];
        let mut values = [usize::MAX as *mut c_void, 32 as *mut c_void, 100 as *mut c_void];
        let options = Options::read(3, keys.as_ptr(), values.as_mut_ptr()).unwrap();
        options.give_outputs(Reader::new(&[]));
        assert_eq!(values[2] as usize, 100, "an older worker");
        let time = u64::from(1.5f32.to_bits());
        options.give_outputs(Reader::new(&[7, 8, time].map(u64::to_le_bytes).concat()));
        let high = usize::MAX << 32;
        // SAFETY: the array is a live local, which the call above has changed through its address.
        let now = unsafe { values.as_ptr().read_volatile() } as usize;
        assert_eq!(now, high | time as usize);
        // SAFETY: as above.
        let now = [1, 2].map(|i| unsafe { values.as_ptr().add(i).read_volatile() } as usize);
        assert_eq!(now, [32, 7]);
    }

    #[test]
    fn options_without_keys_are_invalid() {
        let none = Options::read(1, std::ptr::null(), std::ptr::null());
        assert_eq!(none.err(), Some(INVALID_VALUE));
        assert!(Options::read(0, std::ptr::null(), std::ptr::null()).is_ok());
        let key = [0];
        assert_eq!(Options::read(1, key.as_ptr(), std::ptr::null()).map(|o| o.pairs), Ok(vec![(0, 0)]));
    }
}
