//! Calls that the driver refuses.

use super::{Kernel, LEGACY, Run};
use crate::generate::SIGNALS;
use crate::program::{Invalid, Op};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the process exits at the first failure of a valid call.
///
/// A program that continued could use memory which it does not have.
pub static STRICT: AtomicBool = AtomicBool::new(false);

/// Bytes of a value for which streams wait.
const WORD: usize = 4;

impl Run<'_> {
    /// Makes a call that the driver refuses.
    pub(super) fn refused(&self, number: usize, invalid: Invalid) {
        let driver = &self.device.driver;
        let (mut address, mut handle) = (0u64, null_mut());
        let out = &raw mut address;
        let last = self.signals + (WORD * (SIGNALS - 1)) as u64;
        // SAFETY: pointers are locals of the right types; the driver reads no memory that a refused
        // call names.
        let (name, result) = unsafe {
            match invalid {
                Invalid::AllocateNothing => ("cuMemAlloc of 0 bytes", (driver.cuMemAlloc_v2)(out, 0)),
                Invalid::AllocateTooMuch => {
                    ("cuMemAlloc of 2^50 bytes", (driver.cuMemAlloc_v2)(out, 1 << 50))
                }
                Invalid::FreeUnknown => ("cuMemFree of an unknown address", (driver.cuMemFree_v2)(0x1000)),
                Invalid::FillMisaligned => (
                    "cuMemsetD32Async of a misaligned address",
                    (driver.cuMemsetD32Async)(self.signals + 1, 0, 1, LEGACY),
                ),
                Invalid::BlockTooLarge => ("cuLaunchKernel of 2048 threads", self.launch_nothing(1, 2048)),
                Invalid::EmptyGrid => ("cuLaunchKernel of no block", self.launch_nothing(0, 32)),
                Invalid::TimeOfUnrecorded => {
                    let (mut event, mut time) = (null_mut(), 0.0);
                    (driver.cuEventCreate)(&raw mut event, 0);
                    let result = (driver.cuEventElapsedTime_v2)(&raw mut time, event, event);
                    (driver.cuEventDestroy_v2)(event);
                    ("cuEventElapsedTime of an event without time", result)
                }
                Invalid::EndOfNoCapture => {
                    let mut stream = null_mut();
                    (driver.cuStreamCreate)(&raw mut stream, 1);
                    let result = (driver.cuStreamEndCapture)(stream, &raw mut handle);
                    (driver.cuStreamDestroy_v2)(stream);
                    ("cuStreamEndCapture without a capture", result)
                }
                Invalid::UnregisterUnknown => {
                    let mut page = [0u8; 64];
                    (
                        "cuMemHostUnregister of unknown memory",
                        (driver.cuMemHostUnregister)(page.as_mut_ptr().cast()),
                    )
                }
                Invalid::DevicePointerOfUnknown => {
                    let mut page = [0u8; 64];
                    let result = (driver.cuMemHostGetDevicePointer_v2)(out, page.as_mut_ptr().cast(), 0);
                    ("cuMemHostGetDevicePointer of unknown memory", result)
                }
                Invalid::FunctionUnknown => (
                    "cuModuleGetFunction of no module",
                    (driver.cuModuleGetFunction)(&raw mut handle, null_mut(), c"none".as_ptr()),
                ),
                Invalid::CopyFromNull => {
                    ("cuMemcpyHtoD from no address", (driver.cuMemcpyHtoD_v2)(self.signals, null(), 4))
                }
                Invalid::AttributeOfUnknown => (
                    "cuPointerGetAttribute of an unknown address",
                    (driver.cuPointerGetAttribute)(out.cast(), 2, 0x1000),
                ),
                Invalid::FillBeyond => (
                    "cuMemsetD8Async beyond an allocation",
                    (driver.cuMemsetD8Async)(last, 0, WORD + 1, LEGACY),
                ),
                Invalid::CopyToBeyond => {
                    let bytes = [0u8; 2 * WORD];
                    let result = (driver.cuMemcpyHtoDAsync_v2)(last, bytes.as_ptr().cast(), 2 * WORD, LEGACY);
                    ("cuMemcpyHtoDAsync beyond an allocation", result)
                }
                Invalid::CopyFromBeyond => {
                    let mut bytes = [0u8; 2 * WORD];
                    let result = (driver.cuMemcpyDtoH_v2)(bytes.as_mut_ptr().cast(), last, 2 * WORD);
                    ("cuMemcpyDtoH beyond an allocation", result)
                }
                Invalid::CopyWithinBeyond => (
                    "cuMemcpyDtoD beyond an allocation",
                    (driver.cuMemcpyDtoD_v2)(self.signals, self.signals + WORD as u64, SIGNALS * WORD),
                ),
                Invalid::CopyFromUnknown => {
                    let mut bytes = [0u8; WORD];
                    let result =
                        (driver.cuMemcpyDtoHAsync_v2)(bytes.as_mut_ptr().cast(), 0x1000, WORD, LEGACY);
                    ("cuMemcpyDtoHAsync from an unknown address", result)
                }
                Invalid::NoMode => {
                    let mut stream = null_mut();
                    (driver.cuStreamCreate)(&raw mut stream, 1);
                    let result = (driver.cuStreamBeginCapture_v2)(stream, 7);
                    (driver.cuStreamDestroy_v2)(stream);
                    ("cuStreamBeginCapture in no mode", result)
                }
            }
        };
        self.note(number, name, result);
    }

    /// Exits at the failure of a valid call, if the command line says so.
    pub(super) fn judge(&self, step: usize, result: u32) {
        let refused = || self.program.steps.get(step).is_some_and(|step| matches!(step.op, Op::Refused(_)));
        if result != 0 && STRICT.load(Ordering::Relaxed) && !refused() {
            std::process::exit(1);
        }
    }

    /// Launches a kernel that would fold no words.
    fn launch_nothing(&self, grid: u32, block: u32) -> u32 {
        let (to, from, words, salt) = (self.signals, self.signals, 0, 0);
        let mut kernel = Kernel { function: self.device.fold, grid, block, to, from, words, salt, spin: 0 };
        let mut parameters = kernel.parameters();
        let (function, list) = (kernel.function, parameters.as_mut_ptr());
        // SAFETY: the parameters live until the return.
        unsafe {
            (self.device.driver.cuLaunchKernel)(
                function,
                grid,
                1,
                1,
                block,
                1,
                1,
                0,
                LEGACY,
                list,
                null_mut(),
            )
        }
    }
}
