//! Legacy handles of memory and of events, within their own process.
//!
//! `tests/programs/ipcMemory.cu` and `ipcEvent.cu` use them in several processes.

mod common;

use common::{machine, ok};
use simgpu::exports::ipc::{
    Passed, cuIpcCloseMemHandle, cuIpcGetEventHandle, cuIpcGetMemHandle, cuIpcOpenEventHandle,
    cuIpcOpenMemHandle_v2,
};
use simgpu::exports::{copy, stream};
use simgpu::ipc::Counter;

const INVALID_VALUE: u32 = 1;
const INVALID_CONTEXT: u32 = 201;
const MAP_FAILED: u32 = 205;
const INVALID_HANDLE: u32 = 400;

#[test]
fn a_process_shares_its_objects_and_does_not_open_them() {
    let m = machine();
    let (mut handle, mut again, mut at, mut value) = ([0u8; 64], [0u8; 64], 0, 7u32);
    let (mut plain, mut event, mut opened) = (0, 0, 0);
    // SAFETY: locals of the right types and sizes, and memory of the machine.
    unsafe {
        ok(copy::cuMemcpyHtoD_v2(m.memory, &raw const value as u64, 4));
        ok(cuIpcGetMemHandle(&raw mut handle, m.memory));
        ok(cuIpcGetMemHandle(&raw mut again, m.memory));
        assert_eq!(handle, again, "one name for the life of the memory");
        value = 0;
        ok(copy::cuMemcpyDtoH_v2(&raw mut value as u64, m.memory, 4));
        assert_eq!(value, 7, "it keeps its contents");
        let open = |bytes, flags, at: &mut u64| cuIpcOpenMemHandle_v2(at, Passed::of(bytes), flags);
        assert_eq!(open(handle, 1, &mut at), INVALID_CONTEXT);
        assert_eq!((open(handle, 0, &mut at), open([0; 64], 1, &mut at)), (INVALID_VALUE, INVALID_VALUE));
        assert_eq!(cuIpcCloseMemHandle(m.memory), INVALID_VALUE, "nothing was opened");
        ok(stream::cuEventCreate(&raw mut plain, 2));
        ok(stream::cuEventCreate(&raw mut event, 2 | 4));
        assert_eq!(cuIpcGetEventHandle(&raw mut again, plain), INVALID_HANDLE);
        ok(cuIpcGetEventHandle(&raw mut again, event));
        assert_eq!(cuIpcOpenEventHandle(&raw mut opened, Passed::of(again)), INVALID_CONTEXT);
        assert_eq!(cuIpcOpenEventHandle(&raw mut opened, Passed::of(handle)), MAP_FAILED, "no event");
        ok(stream::cuEventRecord(event, 0));
        ok(stream::cuEventSynchronize(event));
    }
}

#[test]
fn records_count_for_other_processes_alone() {
    let counter = Counter::create().unwrap();
    let first = counter.begin();
    assert_eq!((first, counter.of_other()), (1, None));
    assert!(!counter.is_complete(first), "its process lives");
    counter.complete(counter.begin());
    counter.complete(first);
    assert!(counter.is_complete(2), "an older record changes nothing");
}
