//! Shared code of the tests of the driver's behaviour.
#![allow(dead_code)]

use simgpu::exports::{context, device, memory, module, stream};

pub const KERNELS: &std::ffi::CStr = c".version 7.0\n.target sm_52\n.address_size 64\n\
    .visible .entry store(.param .u64 p, .param .u32 v) { .reg .b64 %rd<3>; .reg .b32 %r<3>;\n\
      ld.param.u64 %rd1, [p]; ld.param.u32 %r1, [v]; st.global.u32 [%rd1], %r1; ret; }\n\
    .visible .entry spin(.param .u64 p) { .reg .b64 %rd<3>; .reg .b32 %r<3>; .reg .pred %p<2>;\n\
      ld.param.u64 %rd1, [p]; L: ld.volatile.global.u32 %r1, [%rd1]; setp.eq.u32 %p1, %r1, 0; @%p1 bra L; ret; }\n\
    .visible .entry two(.param .u32 a, .param .align 8 .b8 s[24]) { ret; }\n\
    .visible .global .align 4 .b8 var[100];\n";

/// A context with a module, streams and some memory.
pub struct Machine {
    pub ctx: usize,
    pub module: usize,
    /// Two streams ordered with the legacy stream, and one that is not.
    pub streams: [usize; 3],
    pub memory: u64,
}

/// Panics unless a call succeeded.
pub fn ok(code: u32) {
    assert_eq!(code, 0);
}

pub fn machine() -> Machine {
    let mut m = Machine { ctx: 0, module: 0, streams: [0; 3], memory: 0 };
    // SAFETY: every pointer is a local of the right type.
    unsafe {
        ok(device::cuInit(0));
        ok(context::cuDevicePrimaryCtxRetain(&raw mut m.ctx, 0));
        ok(context::cuCtxSetCurrent(m.ctx));
        ok(module::cuModuleLoadData(&raw mut m.module, KERNELS.as_ptr().cast()));
        for (i, s) in m.streams.iter_mut().enumerate() {
            ok(stream::cuStreamCreate(s, u32::from(i == 2)));
        }
        ok(memory::cuMemAlloc_v2(&raw mut m.memory, 1 << 20));
    }
    m
}

pub fn function(m: &Machine, name: &std::ffi::CStr) -> usize {
    let mut f = 0;
    // SAFETY: as above.
    unsafe { ok(module::cuModuleGetFunction(&raw mut f, m.module, name.as_ptr())) };
    f
}

/// Launches one thread of a kernel with 8-byte parameters.
pub fn launch(f: usize, stream: usize, params: &[u64]) -> u32 {
    let pointers: Vec<*const u8> = params.iter().map(|p| std::ptr::from_ref(p).cast()).collect();
    // SAFETY: one pointer per parameter, each to at least as many bytes as it has.
    unsafe {
        simgpu::exports::launch::cuLaunchKernel(
            f,
            1,
            1,
            1,
            1,
            1,
            1,
            0,
            stream,
            pointers.as_ptr(),
            std::ptr::null(),
        )
    }
}
