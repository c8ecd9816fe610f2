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
