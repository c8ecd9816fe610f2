#!/usr/bin/env python3
"""A program that computes, allocates and fails on request: the driver API through ctypes.

    start             prints `ready SMS MIB`: multiprocessors and memory that the driver reports
    line `busy S B`   launches kernels of B blocks for S seconds, prints `did PER_SECOND CODE`
    line `long`       launches a kernel of about a minute, prints `launched CODE`
    line `contexts N` creates up to N further contexts, prints `contexts MADE CODE`
    line `alloc MIB`  allocates device memory, prints `alloc CODE`
    line `free`       frees the last allocation, prints `free CODE`
    line `fault`      writes to an invalid address, prints `fault CODE`
    line `check`      waits for the GPU, prints `state CODE`
    line `devices`    prints `devices UUID...` of all devices
    line `put N`      writes a number to device memory, prints `put ADDRESS`
    line `get`        reads it back, prints `got N`
    end of stdin      exits
"""

import ctypes
import sys
import time

MULTIPROCESSORS = 16
THREADS = 256
ITERATIONS = 200000
LONG = 4000000000

PTX = b"""
.version 6.4
.target sm_75
.address_size 64
.visible .entry spin(.param .u32 count, .param .u64 out)
{
    .reg .pred %p<2>; .reg .f32 %f<4>; .reg .b32 %r<4>; .reg .b64 %rd<3>;
    ld.param.u32 %r1, [count];
    ld.param.u64 %rd1, [out];
    cvta.to.global.u64 %rd2, %rd1;
    mov.f32 %f1, 0f3F800000;
    mov.f32 %f2, 0f3F7FFFFF;
    mov.u32 %r2, 0;
L:
    fma.rn.f32 %f1, %f1, %f2, %f2;
    add.s32 %r2, %r2, 1;
    setp.lt.u32 %p1, %r2, %r1;
    @%p1 bra L;
    st.global.f32 [%rd2], %f1;
    ret;
}
"""


class Program:
    """The driver, one context, one kernel."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.must("cuInit", 0)
        context, module, total = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        self.kernel, self.out, self.taken = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
        self.must("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.must("cuCtxSetCurrent", context)
        self.must("cuDeviceTotalMem_v2", ctypes.byref(total), 0)
        self.must("cuModuleLoadData", ctypes.byref(module), PTX)
        self.must("cuModuleGetFunction", ctypes.byref(self.kernel), module, b"spin")
        self.must("cuMemAlloc_v2", ctypes.byref(self.out), ctypes.c_size_t(4096))
        count = ctypes.c_int()
        self.must("cuDeviceGetAttribute", ctypes.byref(count), MULTIPROCESSORS, 0)
        print("ready", count.value, total.value >> 20, flush=True)

    def call(self, name, *arguments):
        """Calls the driver, and returns the result."""
        return getattr(self.cuda, name)(*arguments)

    def must(self, name, *arguments):
        """Calls the driver; the call has to succeed."""
        code = self.call(name, *arguments)
        if code != 0:
            print(f"{name}: error {code}", flush=True)
            sys.exit(1)

    def launch(self, blocks, count, address):
        """Launches one kernel, and returns the result."""
        count, address = ctypes.c_uint32(count), ctypes.c_uint64(address)
        values = (ctypes.c_void_p * 2)(*(ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in (count, address)))
        return self.call("cuLaunchKernel", self.kernel, blocks, 1, 1, THREADS, 1, 1, 0, None, values, None)

    def busy(self, seconds, blocks):
        """Launches kernels for a time, a few in flight."""
        begun, done, code = time.monotonic(), 0, 0
        while code == 0 and time.monotonic() - begun < seconds:
            for _ in range(4):
                code = code or self.launch(blocks, ITERATIONS, self.out.value)
            code = code or self.call("cuCtxSynchronize")
            done += 4
        print("did", round(done / (time.monotonic() - begun), 2), code, flush=True)

    def contexts(self, count):
        """Creates further contexts, none of which stays current."""
        for made in range(count):
            code = self.call("cuCtxCreate_v2", ctypes.byref(ctypes.c_void_p()), 0, 0)
            if code != 0:
                return made, code
            self.must("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        return count, 0

    def devices(self):
        """Returns the UUIDs of all devices in hexadecimal."""
        count, uuid, found = ctypes.c_int(), (ctypes.c_ubyte * 16)(), []
        self.must("cuDeviceGetCount", ctypes.byref(count))
        for device in range(count.value):
            self.must("cuDeviceGetUuid_v2", uuid, device)
            found.append(bytes(uuid).hex())
        return found

    def say(self, words):
        """Executes one line of stdin."""
        if words[0] == "busy":
            self.busy(float(words[1]), int(words[2]))
        elif words[0] == "long":
            print("launched", self.launch(4096, LONG, self.out.value), flush=True)
        elif words[0] == "contexts":
            print("contexts", *self.contexts(int(words[1])), flush=True)
        elif words[0] == "alloc":
            self.taken = ctypes.c_uint64()
            print("alloc", self.call("cuMemAlloc_v2", ctypes.byref(self.taken), ctypes.c_size_t(int(words[1]) << 20)), flush=True)
        elif words[0] == "free":
            print("free", self.call("cuMemFree_v2", self.taken), flush=True)
        elif words[0] == "fault":
            code = self.launch(1, 1, 16)
            print("fault", code or self.call("cuCtxSynchronize"), flush=True)
        elif words[0] == "check":
            print("state", self.call("cuCtxSynchronize"), flush=True)
        elif words[0] == "devices":
            print("devices", *self.devices(), flush=True)
        elif words[0] == "put":
            self.must("cuMemsetD32_v2", self.out, ctypes.c_uint32(int(words[1])), ctypes.c_size_t(1024))
            print("put", self.out.value, flush=True)
        elif words[0] == "get":
            number = ctypes.c_uint32()
            self.must("cuMemcpyDtoH_v2", ctypes.byref(number), self.out, ctypes.c_size_t(4))
            print("got", number.value, flush=True)


def main():
    """See above."""
    program = Program()
    for line in sys.stdin:
        program.say(line.split())


if __name__ == "__main__":
    main()
