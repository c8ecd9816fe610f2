//! Options of the driver's compiler and linker, with buffers of the worker for their logs.

use std::ffi::c_void;

use gpusession_proto::frame::Reader;

use crate::answer::{Answer, Failure, bounded};

const MAX_OPTIONS: usize = 64;
/// `CU_JIT_*` options whose value is a number; others are addresses in the client.
const NUMBERS: &[i32] = &[0, 1, 7, 8, 9, 10, 11, 12, 13, 14, 16, 20, 21, 22, 23, 24, 29, 30, 31, 32, 33, 34];
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
            let (key, value) = (r.word()? as i32, r.word()?);
            match key {
                INFO_SIZE => options.info.resize(value.min(MAX_LOG) as usize, 0),
                ERROR_SIZE => options.error.resize(value.min(MAX_LOG) as usize, 0),
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
        const WALL_TIME: i32 = 2;
        const SYMBOL_NAMES: i32 = 17;
        let client = 0x7fff_0000_1000;
        let keys = [MAX_REGISTERS, INFO_LOG, ERROR_LOG, WALL_TIME, SYMBOL_NAMES, -1, 99];
        let pairs: Vec<_> = keys.iter().map(|key| (*key, client)).collect();
        let options = read(&pairs).unwrap_or_else(|_| panic!("readable"));
        assert_eq!(options.keys, [MAX_REGISTERS]);
    }

    #[test]
    fn log_has_a_buffer_of_its_size() {
        let options = read(&[(INFO_SIZE, 100), (ERROR_SIZE, 1 << 40)]).unwrap_or_else(|_| panic!("readable"));
        assert_eq!(options.keys, [INFO_SIZE, ERROR_SIZE, INFO_LOG, ERROR_LOG]);
        assert_eq!((options.info.len(), options.error.len()), (100, MAX_LOG as usize));
        assert_eq!(options.values[2], options.info.as_ptr().cast_mut().cast());
        assert_eq!(options.values[3], options.error.as_ptr().cast_mut().cast());
        assert_eq!(read(&[(ERROR_SIZE, 0)]).map(|options| options.keys).ok(), Some(vec![ERROR_SIZE]));
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
    fn number_of_options_is_bounded() {
        assert!(read(&[(0, 1); MAX_OPTIONS]).is_ok());
        assert!(read(&[(0, 1); MAX_OPTIONS + 1]).is_err());
    }
}
