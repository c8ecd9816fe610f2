//! Options of the driver's compiler and linker, with buffers of the worker for their logs.

use std::ffi::c_void;

use gpusession_proto::frame::Reader;

use crate::answer::{Answer, Failure, bounded};

const MAX_OPTIONS: usize = 64;
/// `CU_JIT_*` options whose value is a number; others are addresses in the client.
const NUMBERS: &[i32] = &[0, 1, 7, 8, 9, 10, 11, 12, 13, 14, 16, 20, 21, 22, 23, 24, 29, 30, 31, 32, 33, 34];
/// `CU_JIT_WALL_TIME`, a float that the driver writes.
const WALL_TIME: i32 = 2;
/// `CU_JIT_*` options whose value is a buffer or its size.
const INFO_LOG: i32 = 3;
const INFO_SIZE: i32 = 4;
const ERROR_LOG: i32 = 5;
const ERROR_SIZE: i32 = 6;
const MAX_LOG: u64 = 1 << 20;

/// JIT options in the driver's form, with log buffers of the worker.
pub struct Options {
    pub keys: Vec<i32>,
    pub values: Vec<*mut c_void>,
    info: Vec<u8>,
    error: Vec<u8>,
}

impl Options {
    /// Reads the options of a frame; those whose value is an address in the client are left out.
    pub fn read(r: &mut Reader<'_>) -> Result<Self, Failure> {
        let count = bounded(r.word()?, MAX_OPTIONS)?;
        let mut options = Self { keys: Vec::new(), values: Vec::new(), info: Vec::new(), error: Vec::new() };
        for _ in 0..count {
            let (key, mut value) = (r.word()? as i32, r.word()?);
            match key {
                INFO_SIZE | ERROR_SIZE => {
                    // The driver reads the low half.
                    value = u64::from(value as u32).min(MAX_LOG);
                    let log = if key == INFO_SIZE { &mut options.info } else { &mut options.error };
                    // Of an option given twice, the driver may use either size. It also takes a
                    // buffer with a size of 0.
                    log.resize(log.len().max(value as usize).max(1), 0);
                }
                WALL_TIME => {}
                _ if NUMBERS.contains(&key) => {}
                _ => continue,
            }
            options.keys.push(key);
            options.values.push(value as usize as *mut c_void);
        }
        for (key, log) in [(INFO_LOG, &mut options.info), (ERROR_LOG, &mut options.error)] {
            if !log.is_empty() {
                options.keys.push(key);
                options.values.push(log.as_mut_ptr().cast());
            }
        }
        Ok(options)
    }

    /// Answers both logs as far as the driver has written them.
    pub fn logs(&self, answer: &mut Answer) {
        for log in [&self.info, &self.error] {
            let end = log.iter().position(|b| *b == 0).unwrap_or(log.len());
            answer.bytes(&log[..end]);
        }
    }

    /// Answers the values that the driver has written: sizes of the logs, time.
    ///
    /// It answers 0 for an option that the client has not given.
    pub fn outputs(&self, answer: &mut Answer) {
        for wanted in [INFO_SIZE, ERROR_SIZE, WALL_TIME] {
            let found = self.keys.iter().position(|key| *key == wanted);
            answer.word(found.map_or(0, |at| u64::from(self.values[at] as usize as u32)));
        }
    }
}

// SAFETY: the addresses in `values` are of the logs in the same structure, or numbers.
unsafe impl Send for Options {}

#[cfg(test)]
mod tests {
    use gpusession_proto::frame::{HEADER, Header, Writer};

    use super::*;

    fn read(pairs: &[(i32, u64)]) -> Result<Options, Failure> {
        let mut frame = Vec::new();
        let mut w = Writer::new(&mut frame, &Header::empty());
        w.word(pairs.len() as u64);
        for (key, value) in pairs {
            w.word(*key as u32 as u64);
            w.word(*value);
        }
        w.finish();
        Options::read(&mut Reader::new(&frame[HEADER..]))
    }

    #[test]
    fn driver_gets_no_address_of_the_client() {
        const MAX_REGISTERS: i32 = 0;
        const SYMBOL_NAMES: i32 = 17;
        let client = 0x7fff_0000_1000;
        let keys = [MAX_REGISTERS, INFO_LOG, ERROR_LOG, SYMBOL_NAMES, -1, 99];
        let pairs: Vec<_> = keys.iter().map(|key| (*key, client)).collect();
        let options = read(&pairs).unwrap_or_else(|_| panic!("readable"));
        assert_eq!(options.keys, [MAX_REGISTERS]);
    }

    #[test]
    fn log_has_a_buffer_of_its_size() {
        let options =
            read(&[(INFO_SIZE, 7 << 32 | 100), (ERROR_SIZE, 1 << 31)]).unwrap_or_else(|_| panic!("readable"));
        assert_eq!(options.keys, [INFO_SIZE, ERROR_SIZE, INFO_LOG, ERROR_LOG]);
        assert_eq!((options.info.len(), options.error.len()), (100, MAX_LOG as usize));
        assert_eq!(options.values[0] as u64, 100, "the driver is told no more");
        assert_eq!(options.values[1] as u64, MAX_LOG);
        assert_eq!(options.values[2], options.info.as_ptr().cast_mut().cast());
        assert_eq!(options.values[3], options.error.as_ptr().cast_mut().cast());
        let empty = read(&[(ERROR_SIZE, 0)]).unwrap_or_else(|_| panic!("readable"));
        assert_eq!((empty.keys, empty.values[0] as u64), (vec![ERROR_SIZE, ERROR_LOG], 0));
    }

    #[test]
    fn answer_ends_each_log_at_its_terminator() {
        let mut options = read(&[(INFO_SIZE, 8), (ERROR_SIZE, 4)]).unwrap_or_else(|_| panic!("readable"));
        options.info[..3].copy_from_slice(b"ok\0");
        options.error.copy_from_slice(b"full");
        let mut answer = Answer::default();
        options.logs(&mut answer);
        let mut r = Reader::new(&answer.body);
        assert_eq!((r.bytes(), r.bytes()), (Ok(&b"ok"[..]), Ok(&b"full"[..])));
    }

    #[test]
    fn answer_has_what_the_driver_has_written() {
        let mut options = read(&[(WALL_TIME, 1), (INFO_SIZE, 8)]).unwrap_or_else(|_| panic!("readable"));
        options.values[0] = 2.5f32.to_bits() as usize as *mut c_void;
        options.values[1] = 3 as *mut c_void;
        let mut answer = Answer::default();
        options.outputs(&mut answer);
        let mut r = Reader::new(&answer.body);
        assert_eq!([r.word(), r.word(), r.word()], [Ok(3), Ok(0), Ok(u64::from(2.5f32.to_bits()))]);
    }

    #[test]
    fn number_of_options_is_bounded() {
        assert!(read(&[(0, 1); MAX_OPTIONS]).is_ok());
        assert!(read(&[(0, 1); MAX_OPTIONS + 1]).is_err());
    }
}
