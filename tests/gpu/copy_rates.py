"""Copies pinned memory in each direction for two seconds; prints bytes a second as JSON.

Needs no PyTorch: the driver library alone.
"""

import ctypes
import json
import sys
import time

MIB = int(sys.argv[1]) if len(sys.argv) > 1 else 8
BYTES = MIB << 20
# Copies that wait for the device at a time.
DEPTH = 4
SECONDS = 2
# CU_EVENT_DISABLE_TIMING
EVENT_DISABLE_TIMING = 2


def call(name, *arguments):
    """Calls the driver, and stops at an error."""
    status = getattr(cuda, name)(*arguments)
    if status != 0:
        sys.exit(f"copy_rates: {name}: error {status}")


def rate(name, *arguments):
    """Returns the bytes a second of a call; a copy begins once the fourth before it is complete."""
    for _ in range(2):
        call(name, *arguments, ctypes.c_size_t(BYTES), None)
    call("cuCtxSynchronize")
    events = [ctypes.c_void_p() for _ in range(DEPTH)]
    for event in events:
        call("cuEventCreate", ctypes.byref(event), EVENT_DISABLE_TIMING)
    begun, copies = time.monotonic(), 0
    while time.monotonic() < begun + SECONDS or copies % DEPTH != 0:
        event = events[copies % DEPTH]
        if copies >= DEPTH:
            call("cuEventSynchronize", event)
        call(name, *arguments, ctypes.c_size_t(BYTES), None)
        call("cuEventRecord", event, None)
        copies += 1
    call("cuCtxSynchronize")
    return copies * BYTES / (time.monotonic() - begun)


cuda = ctypes.CDLL("libcuda.so.1")
context, host, device = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(BYTES), 0)
call("cuMemAlloc_v2", ctypes.byref(device), ctypes.c_size_t(BYTES))
to_server = rate("cuMemcpyHtoDAsync_v2", device, host)
print(json.dumps({"to_server": to_server, "from_server": rate("cuMemcpyDtoHAsync_v2", host, device)}))
