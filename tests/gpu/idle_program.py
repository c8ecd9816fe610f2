#!/usr/bin/env python3
"""A program that holds device memory and waits: the driver API through ctypes, without PyTorch.

    idle_program.py GIB      allocates GIB of memory, writes a pattern, prints `ready`
    line `check` on stdin    reads it back, prints `intact SECONDS` (of the first call and of all)
    line `spin N`            fills memory N times, prints `spun SECONDS`
    line `kernel SECONDS`    runs one kernel of this duration, waits, prints `kernel SECONDS`
    line `fork`              forks a child that outlives it, prints `forked`
    line `exec`              replaces itself by `sleep`
    line `fail`              waits until a call fails, prints `failed CODE`, and `failed CODE` of
                             the next call, exits
    end of stdin             exits
"""

import ctypes
import os
import sys
import time

BLOCK = 1 << 28
# Runs for N nanoseconds.
SPIN = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 time)
{
    .reg .u64 %rd<4>;
    .reg .pred %p;
    ld.param.u64 %rd1, [time];
    mov.u64 %rd2, %globaltimer;
    add.u64 %rd1, %rd1, %rd2;
again:
    mov.u64 %rd3, %globaltimer;
    setp.lt.u64 %p, %rd3, %rd1;
    @%p bra again;
    ret;
}
"""


def main():
    """See above."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name, *arguments):
        code = getattr(cuda, name)(*arguments)
        if code != 0:
            print(f"{name}: error {code}", flush=True)
            sys.exit(1)

    size = int(float(sys.argv[1]) * (1 << 30)) // 4096 * 4096
    call("cuInit", 0)
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    blocks = []
    while size > 0:
        length = min(BLOCK, size)
        address = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(length))
        call("cuMemsetD32_v2", address, ctypes.c_uint32(0x1D1E0000 + len(blocks)), ctypes.c_size_t(length // 4))
        blocks.append((address.value, length))
        size -= length
    call("cuCtxSynchronize")
    print("ready", flush=True)
    for line in sys.stdin:
        words, begun = line.split(), time.monotonic()
        if words[0] == "check":
            first = None
            for i, (address, length) in enumerate(blocks):
                for offset in (0, length // 8 * 4, length - 4):
                    value = ctypes.c_uint32()
                    call("cuMemcpyDtoH_v2", ctypes.byref(value), ctypes.c_uint64(address + offset), ctypes.c_size_t(4))
                    first = first or time.monotonic() - begun
                    if value.value != 0x1D1E0000 + i:
                        print(f"block {i} at {offset}: {value.value:#x}", flush=True)
                        sys.exit(1)
            print(f"intact {first:.3f} {time.monotonic() - begun:.3f}", flush=True)
        elif words[0] == "spin":
            address, length = blocks[0]
            for _ in range(int(words[1])):
                call("cuMemsetD32_v2", ctypes.c_uint64(address), ctypes.c_uint32(0x1D1E0000), ctypes.c_size_t(length // 4))
            call("cuCtxSynchronize")
            print(f"spun {time.monotonic() - begun:.3f}", flush=True)
        elif words[0] == "kernel":
            module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
            call("cuModuleLoadData", ctypes.byref(module), SPIN)
            call("cuModuleGetFunction", ctypes.byref(kernel), module, b"spin")
            length = ctypes.c_uint64(int(float(words[1]) * 1e9))
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(length))
            call("cuLaunchKernel", kernel, *[ctypes.c_uint(n) for n in (1, 1, 1, 1, 1, 1, 0)], None, arguments, None)
            call("cuCtxSynchronize")
            print(f"kernel {time.monotonic() - begun:.3f}", flush=True)
        elif words[0] == "fork":
            if os.fork() == 0:
                while True:
                    time.sleep(1000)
            print("forked", flush=True)
        elif words[0] == "exec":
            os.execvp("sleep", ["sleep", "1000"])
        elif words[0] == "fail":
            codes = []
            while len(codes) < 2:
                if code := cuda.cuCtxSynchronize():
                    codes.append(code)
                    print(f"failed {code}", flush=True)
                time.sleep(0.05)
            sys.exit(0)


if __name__ == "__main__":
    main()
