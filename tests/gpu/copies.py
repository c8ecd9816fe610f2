"""Copies of 256 MiB in both directions, pageable and pinned, with a check of the result.

Also images, whose rows lie apart on both sides, from and to pinned memory.
"""

import ctypes
import statistics
import time

import common
from memcpy2d import Image, Side

BYTES = 256 << 20


# `CUmemorytype`
HOST, DEVICE = 1, 2
# Bytes of a row and rows of an image of three colours; pitches of the device's and the host's rows.
WIDTH, HEIGHT, DEVICE_PITCH, HOST_PITCH = 3 * 1920, 1080, 6144, 6000


def images(device, pinned, back, repeat):
    """Measures copies of images, several under way; arguments: addresses with room for one each.

    Returns whether the rows of `back` are those of `pinned` at the end.
    """
    cuda = ctypes.CDLL("libcuda.so.1")
    there = Side(kind=DEVICE, device=device, pitch=DEVICE_PITCH)
    for name, source, target in (
        ("h2d_image", Side(kind=HOST, host=pinned, pitch=HOST_PITCH), there),
        ("d2h_image", there, Side(kind=HOST, host=back, pitch=HOST_PITCH)),
    ):
        image = Image(source, target, WIDTH, HEIGHT)
        for count in (3, 10 * repeat):
            begun = time.perf_counter()
            for _ in range(count):
                if status := cuda.cuMemcpy2DAsync_v2(ctypes.byref(image), None):
                    raise RuntimeError(f"cuMemcpy2DAsync: error {status}")
            if status := cuda.cuCtxSynchronize():
                raise RuntimeError(f"cuCtxSynchronize: error {status}")
            taken = time.perf_counter() - begun
        common.measure(name, count * WIDTH * HEIGHT / taken / 1e9, "GB/s")
    row = ctypes.string_at
    return all(row(back + y * HOST_PITCH, WIDTH) == row(pinned + y * HOST_PITCH, WIDTH) for y in range(HEIGHT))


def bench(quick):
    """The measurements of the table."""
    import torch

    repeat = 5 if quick else 10
    source = torch.arange(BYTES // 8, dtype=torch.int64)
    pinned = source.clone().pin_memory()
    device = torch.empty(BYTES // 8, dtype=torch.int64, device="cuda")
    back = torch.empty(BYTES // 8, dtype=torch.int64).pin_memory()

    def rate(function):
        taken = []
        for _ in range(repeat + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        return BYTES / statistics.median(taken[1:]) / 1e9

    def check(what, found):
        print("copies", what, "right" if torch.equal(found, source) else "WRONG")

    common.measure("h2d_pageable", rate(lambda: device.copy_(source)), "GB/s")
    check("h2d_pageable", device.cpu())
    device.zero_()
    common.measure("h2d_pinned", rate(lambda: device.copy_(pinned, non_blocking=True)), "GB/s")
    check("h2d_pinned", device.cpu())
    common.measure("d2h_pageable", rate(device.cpu), "GB/s")
    common.measure("d2h_pinned", rate(lambda: back.copy_(device, non_blocking=True)), "GB/s")
    check("d2h_pinned", back)

    back.zero_()
    right = images(device.data_ptr(), pinned.data_ptr(), back.data_ptr(), repeat)
    print("copies images", "right" if right else "WRONG")

    for kib in (128, 1024, 16384):
        some, there = torch.arange(kib * 128, dtype=torch.int64), torch.empty(kib * 128, dtype=torch.int64, device="cuda")

        def upload(some=some, there=there):
            there.copy_(some)
            torch.cuda.synchronize()

        common.measure(f"h2d_pageable_{kib}KiB", common.timed(upload, 8 * repeat) * 1e6, "us")
        common.expect(f"copies h2d_pageable {kib} KiB", torch.equal(there.cpu(), some))

    def both():
        with torch.cuda.stream(streams[0]):
            other.copy_(pinned, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            back.copy_(device, non_blocking=True)

    other = torch.empty_like(device)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    common.measure("both_ways_pinned", 2 * rate(both), "GB/s")
    check("both ways", other.cpu())


def large():
    """Copies more bytes than a message may have, there and back, if the memory suffices."""
    import os

    import torch

    size = 9 << 30
    if torch.cuda.mem_get_info()[0] < 2 * size or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 4 * size:
        print("copies large: not tried, too little memory")
        return
    source = torch.arange(size // 8, dtype=torch.int64)
    device = source.cuda()
    back = torch.empty(size // 8, dtype=torch.int64, pin_memory=True)
    back.copy_(device, non_blocking=True)
    torch.cuda.synchronize()
    print("copies large", "right" if torch.equal(back, source) else "WRONG")


if __name__ == "__main__":
    large()
