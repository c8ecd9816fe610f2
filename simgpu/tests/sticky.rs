//! A fault breaks the context and the process, with the driver's codes (measured on an H200).

mod common;

use common::{function, launch, machine, ok};
use simgpu::exports::{context, memory, stream};

#[test]
fn a_fault_stays() {
    let m = machine();
    let store = function(&m, c"store");
    let [s, other, _] = m.streams;
    let (mut p, mut ctx, mut flags, mut active, mut id) = (0u64, 0usize, 0u32, 0i32, 0i32);
    // SAFETY: every pointer is a local of the right type.
    unsafe {
        ok(launch(store, s, &[0x10, 1]));
        assert_eq!(stream::cuStreamSynchronize(s), 700);
        assert_eq!(stream::cuStreamSynchronize(other), 700);
        assert_eq!(launch(store, s, &[m.memory, 1]), 700);
        assert_eq!(memory::cuMemAlloc_v2(&raw mut p, 64), 700);
        assert_eq!(memory::cuMemFree_v2(m.memory), 700);
        assert_eq!(stream::cuStreamDestroy_v2(other), 700);
        assert_eq!(context::cuCtxSynchronize(), 700);
        ok(context::cuCtxGetCurrent(&raw mut ctx));
        ok(context::cuCtxGetDevice(&raw mut id));
        ok(memory::cuPointerGetAttribute((&raw mut id).cast(), 9, m.memory));
        ok(context::cuDevicePrimaryCtxReset_v2(0));
        ok(context::cuDevicePrimaryCtxGetState(0, &raw mut flags, &raw mut active));
        assert_eq!(active, 0);
        assert_eq!(memory::cuMemAlloc_v2(&raw mut p, 64), 709);
        assert_eq!(context::cuCtxCreate_v2(&raw mut ctx, 0, 0), 700);
    }
}
