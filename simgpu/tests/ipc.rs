//! The older interface to share memory and events with other processes, which this machine lacks.

mod common;

use common::machine;
use simgpu::exports::memory;

const INVALID_VALUE: u32 = 1;
const NOT_SUPPORTED: i32 = 801;

// Generated functions, which ignore their arguments.
unsafe extern "C" {
    fn cuIpcOpenMemHandle_v2() -> i32;
    fn cuIpcCloseMemHandle() -> i32;
    fn cuIpcGetEventHandle() -> i32;
    fn cuIpcOpenEventHandle() -> i32;
}

#[test]
fn legacy_ipc_is_refused() {
    let m = machine();
    let mut handle = [7u8; 64];
    // SAFETY: the array has the size of a handle; the others take nothing.
    unsafe {
        assert_eq!(memory::cuIpcGetMemHandle(handle.as_mut_ptr(), m.memory), INVALID_VALUE);
        let others =
            [cuIpcOpenMemHandle_v2(), cuIpcCloseMemHandle(), cuIpcGetEventHandle(), cuIpcOpenEventHandle()];
        assert_eq!(others, [NOT_SUPPORTED; 4]);
    }
    assert_eq!(handle, [7; 64], "nothing is handed out");
}
