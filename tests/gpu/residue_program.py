#!/usr/bin/env python3
"""A program that leaves a pattern in memory, or looks for one: the driver API through ctypes.

    residue_program.py fill KIND MIB   writes a pattern to memory of this kind, prints `ready PID`
    line `check` on stdin              counts the pattern, prints `intact` or what it has instead
    end of stdin                       exits
    residue_program.py look KIND MIB   allocates up to MIB, and writes nothing to it; prints `found`
                                       and the words with the pattern, with another value but 0, and
                                       in all; then the same of memory with the pattern
"""

import ctypes
import os
import sys

from memcpy2d import Image, Side

PATTERN = 0x5EC2E7A5
BLOCK = 64 << 20
# Memory that stays free on the card, so that the driver keeps working.
SPARE = 256 << 20
OUT_OF_MEMORY = 2
# Blocks of threads of a launch.
GRID = 1024
# Rows of an array of 32-bit words.
WIDTH = 16384
# CU_MEM_ATTACH_GLOBAL, CU_AD_FORMAT_UNSIGNED_INT32, CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_ARRAY
ATTACH_GLOBAL, UNSIGNED_INT32, DEVICE, ARRAY = 1, 3, 2, 3
# Adds the number of words with the pattern, and with another value but 0, to two counters.
COUNT = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry count(.param .u64 data, .param .u64 words, .param .u64 counters)
{
    .reg .u32 %r<8>;
    .reg .u64 %rd<12>;
    .reg .pred %p<4>;
    ld.param.u64 %rd1, [data];
    ld.param.u64 %rd2, [words];
    ld.param.u64 %rd3, [counters];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %nctaid.x;
    mad.lo.u32 %r5, %r1, %r2, %r3;
    mul.lo.u32 %r6, %r4, %r2;
    cvt.u64.u32 %rd4, %r5;
    cvt.u64.u32 %rd5, %r6;
    mov.u64 %rd8, 0;
    mov.u64 %rd9, 0;
next:
    setp.ge.u64 %p1, %rd4, %rd2;
    @%p1 bra done;
    shl.b64 %rd6, %rd4, 2;
    add.u64 %rd7, %rd1, %rd6;
    ld.global.u32 %r7, [%rd7];
    add.u64 %rd4, %rd4, %rd5;
    setp.eq.u32 %p2, %r7, 0;
    @%p2 bra next;
    setp.eq.u32 %p3, %r7, 0x5EC2E7A5;
    @%p3 bra pattern;
    add.u64 %rd9, %rd9, 1;
    bra next;
pattern:
    add.u64 %rd8, %rd8, 1;
    bra next;
done:
    atom.global.add.u64 %rd10, [%rd3], %rd8;
    atom.global.add.u64 %rd11, [%rd3+8], %rd9;
    ret;
}
"""


class ArrayDescriptor(ctypes.Structure):
    """`CUDA_ARRAY_DESCRIPTOR`"""

    _fields_ = [("width", ctypes.c_size_t), ("height", ctypes.c_size_t), ("format", ctypes.c_int), ("channels", ctypes.c_uint)]


class AllocationProperty(ctypes.Structure):
    """`CUmemAllocationProp`"""

    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", ctypes.c_int), ("id", ctypes.c_int),
                ("security", ctypes.c_void_p), ("flags", ctypes.c_uint8 * 8)]


class Access(ctypes.Structure):
    """`CUmemAccessDesc`"""

    _fields_ = [("location", ctypes.c_int), ("id", ctypes.c_int), ("flags", ctypes.c_int)]


class Card:
    """Allocates memory of one kind in blocks, and counts words in it."""

    def __init__(self, kind):
        self.cuda, self.kind = ctypes.CDLL("libcuda.so.1"), kind
        context, module = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        self.kernel = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), COUNT)
        self.call("cuModuleGetFunction", ctypes.byref(self.kernel), module, b"count")
        self.counters, self.aside = self.device(16), self.device(BLOCK) if kind == "array" else None

    def call(self, name, *arguments):
        """Calls the driver, and stops at an error."""
        if code := getattr(self.cuda, name)(*arguments):
            print(f"{name}: error {code}", flush=True)
            sys.exit(1)

    def device(self, length):
        """Allocates device memory."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(length))
        return address

    def block(self):
        """Allocates a block, or returns None where there is no room."""
        made = ctypes.c_uint64()
        length = ctypes.c_size_t(BLOCK)
        if self.kind == "device":
            code = self.cuda.cuMemAlloc_v2(ctypes.byref(made), length)
        elif self.kind == "pool":
            code = self.cuda.cuMemAllocAsync(ctypes.byref(made), length, None) or self.cuda.cuStreamSynchronize(None)
        elif self.kind == "managed":
            code = self.cuda.cuMemAllocManaged(ctypes.byref(made), length, ATTACH_GLOBAL)
        elif self.kind == "pinned":
            code = self.cuda.cuMemHostAlloc(ctypes.byref(made), length, 0)
        elif self.kind == "array":
            form = ArrayDescriptor(WIDTH, BLOCK // 4 // WIDTH, UNSIGNED_INT32, 1)
            code = self.cuda.cuArrayCreate_v2(ctypes.byref(made), ctypes.byref(form))
        else:
            code = self.created(made, length)
        if code == OUT_OF_MEMORY:
            return None
        if code:
            print(f"{self.kind}: error {code}", flush=True)
            sys.exit(1)
        return made

    def created(self, made, length):
        """Creates physical memory, and maps it."""
        wanted, handle, on = AllocationProperty(1, 0, 1, 0), ctypes.c_uint64(), Access(1, 0, 3)
        if code := self.cuda.cuMemCreate(ctypes.byref(handle), length, ctypes.byref(wanted), ctypes.c_uint64(0)):
            return code
        self.call("cuMemAddressReserve", ctypes.byref(made), length, ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
        self.call("cuMemMap", made, length, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        self.call("cuMemSetAccess", made, length, ctypes.byref(on), ctypes.c_size_t(1))
        return 0

    def blocks(self, mib):
        """Allocates as many blocks as fit into this amount, and on the card."""
        free, total, made = ctypes.c_size_t(), ctypes.c_size_t(), []
        while len(made) * BLOCK < mib << 20:
            self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
            if self.kind != "pinned" and free.value < BLOCK + SPARE or (one := self.block()) is None:
                break
            made.append(one)
        return made

    def fill(self, block):
        """Writes the pattern to a block."""
        target = self.aside if self.kind == "array" else block
        self.call("cuMemsetD32_v2", target, ctypes.c_uint32(PATTERN), ctypes.c_size_t(BLOCK // 4))
        if self.kind == "array":
            self.copy(block, True)

    def copy(self, array, into):
        """Copies between an array and the memory aside."""
        there = Side(kind=ARRAY, array=array.value)
        here = Side(kind=DEVICE, device=self.aside.value, pitch=4 * WIDTH)
        both = (here, there) if into else (there, here)
        self.call("cuMemcpy2D_v2", ctypes.byref(Image(*both, 4 * WIDTH, BLOCK // 4 // WIDTH)))

    def count(self, blocks):
        """Returns the words with the pattern, with another value but 0, and in all."""
        self.call("cuMemsetD32_v2", self.counters, ctypes.c_uint32(0), ctypes.c_size_t(4))
        for block in blocks:
            if self.kind == "array":
                self.copy(block, False)
            data, words = self.aside if self.kind == "array" else block, ctypes.c_uint64(BLOCK // 4)
            arguments = (ctypes.c_void_p * 3)(*map(ctypes.addressof, (data, words, self.counters)))
            self.call("cuLaunchKernel", self.kernel, *[ctypes.c_uint(n) for n in (GRID, 1, 1, 256, 1, 1, 0)], None, arguments, None)
        found = (ctypes.c_uint64 * 2)()
        self.call("cuMemcpyDtoH_v2", found, self.counters, ctypes.c_size_t(16))
        return found[0], found[1], len(blocks) * BLOCK // 4


def main():
    """See above."""
    what, kind, mib = sys.argv[1], sys.argv[2], int(sys.argv[3])
    card = Card(kind)
    blocks = card.blocks(mib)
    if what == "look":
        print("found", *card.count(blocks), flush=True)
        # Shows that the look finds a pattern that is there.
        card.fill(blocks[0])
        print("found", *card.count(blocks[:1]), flush=True)
        return
    for block in blocks:
        card.fill(block)
    card.call("cuCtxSynchronize")
    print("ready", os.getpid(), flush=True)
    for _ in sys.stdin:
        pattern, other, words = card.count(blocks)
        print("intact" if (pattern, other) == (words, 0) else f"changed: {pattern} of {words} words, {other} others", flush=True)


if __name__ == "__main__":
    main()
