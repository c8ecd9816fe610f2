#!/usr/bin/env python3
"""steps.py N: N steps of uploads, launches and downloads; each step prints its result's checksum.

A step depends on all earlier ones: a call that is lost or happens twice changes every later line.
"""

import ctypes
import random
import sys

from common import digest_of_bytes
from mps_program import THREADS, Program

WORDS = 64 << 10
BYTES = 4 * WORDS
MASK = (1 << 32) - 1
PTX = b"""
.version 6.4
.target sm_75
.address_size 64
.visible .entry mix(.param .u64 state, .param .u64 input, .param .u32 step)
{
    .reg .b32 %r<8>; .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [state];
    ld.param.u64 %rd2, [input];
    ld.param.u32 %r1, [step];
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd2, %rd2;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r2, %r2, %r3, %r4;
    mul.wide.u32 %rd3, %r2, 4;
    add.u64 %rd1, %rd1, %rd3;
    add.u64 %rd2, %rd2, %rd3;
    ld.global.u32 %r5, [%rd1];
    ld.global.u32 %r6, [%rd2];
    mad.lo.u32 %r5, %r5, 1664525, %r6;
    add.u32 %r5, %r5, %r1;
    st.global.u32 [%rd1], %r5;
    ret;
}
"""


class Steps(Program):
    """State and input on the device; the input comes from pageable and from pinned memory."""

    def __init__(self):
        super().__init__()
        module = ctypes.c_void_p()
        self.mix, self.state, self.input = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
        self.pinned, self.stream = ctypes.c_void_p(), ctypes.c_void_p()
        self.must("cuModuleLoadData", ctypes.byref(module), PTX)
        self.must("cuModuleGetFunction", ctypes.byref(self.mix), module, b"mix")
        for memory in (self.state, self.input):
            self.must("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(BYTES))
            self.must("cuMemsetD8_v2", memory, 0, ctypes.c_size_t(BYTES))
        self.must("cuMemAllocHost_v2", ctypes.byref(self.pinned), ctypes.c_size_t(BYTES))
        self.must("cuStreamCreate", ctypes.byref(self.stream), 1)
        self.must("cuCtxSynchronize")

    def launch_mix(self, step):
        """Launches the kernel."""
        values = (ctypes.c_uint64(self.state.value), ctypes.c_uint64(self.input.value), ctypes.c_uint32(step & MASK))
        addresses = (ctypes.c_void_p * 3)(*(ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values))
        self.must("cuLaunchKernel", self.mix, WORDS // THREADS, 1, 1, THREADS, 1, 1, 0, self.stream, addresses, None)

    def step(self, number):
        """Computes one step; returns the checksum of the state."""
        numbers = random.Random(number)
        for part in range(4):
            size = 1 << numbers.randrange(2, 19)
            size, data = min(size, BYTES), numbers.randbytes(min(size, BYTES))
            if part % 2:
                ctypes.memmove(self.pinned, data, size)
                self.must("cuMemcpyHtoDAsync_v2", self.input, self.pinned, ctypes.c_size_t(size), self.stream)
            else:
                self.must("cuMemcpyHtoDAsync_v2", self.input, data, ctypes.c_size_t(size), self.stream)
            self.launch_mix(4 * number + part)
            # The pinned memory is the program's until the copy has read it.
            self.must("cuStreamSynchronize", self.stream)
        if number % 2:
            self.must("cuMemcpyDtoHAsync_v2", self.pinned, self.state, ctypes.c_size_t(BYTES), self.stream)
            self.must("cuStreamSynchronize", self.stream)
            return digest_of_bytes(ctypes.string_at(self.pinned, BYTES))
        result = ctypes.create_string_buffer(BYTES)
        self.must("cuMemcpyDtoH_v2", result, self.state, ctypes.c_size_t(BYTES))
        return digest_of_bytes(result.raw)


def main():
    """Exit status 1 if a call fails."""
    steps = Steps()
    for number in range(int(sys.argv[1])):
        print("step", number, steps.step(number), flush=True)


if __name__ == "__main__":
    main()
