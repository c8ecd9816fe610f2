#!/usr/bin/env python3
"""Processes that share memory by legacy handles: the driver API through ctypes, without PyTorch.

    start NAME           starts a process, prints `started`
    kill NAME            kills it, prints `killed`
    pass FROM TO         one opens the other's memory, prints `open CODE`
    NAME alloc MIB       allocates and fills device memory, prints `alloc CODE`
    NAME free            frees it, prints `free CODE`
    NAME check           reads all memory that it has, prints `intact`, or `wrong` and the place
    NAME close           closes the other's memory, prints `close CODE`
    end of stdin         ends all processes
"""

import ctypes
import subprocess
import sys

PATTERN = 0x5EED0000


class Handle(ctypes.Structure):
    """`CUipcMemHandle`"""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


class Process:
    """A process of the driver, which reads commands."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        for name, *arguments in [("cuInit", 0), ("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0), ("cuCtxSetCurrent", context)]:
            if code := getattr(self.cuda, name)(*arguments):
                sys.exit(f"{name}: error {code}")
        # Addresses, and lengths where this process knows them.
        self.own, self.others = [], []

    def alloc(self, mib):
        """Allocates and fills memory."""
        address, length = ctypes.c_uint64(), int(mib) << 20
        code = self.cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(length))
        if code == 0:
            code = self.cuda.cuMemsetD32_v2(address, ctypes.c_uint32(PATTERN), ctypes.c_size_t(length // 4)) or self.cuda.cuCtxSynchronize()
            self.own.append((address, length))
        return f"alloc {code}"

    def free(self):
        """Frees the last allocation."""
        return f"free {self.cuda.cuMemFree_v2(self.own.pop()[0])}"

    def handle(self):
        """Returns the handle of the last allocation, and its length."""
        handle, (address, length) = Handle(), self.own[-1]
        code = self.cuda.cuIpcGetMemHandle(ctypes.byref(handle), address)
        return f"handle {code} {bytes(handle.bytes).hex()} {length}"

    def open(self, text, length):
        """Opens memory of another process."""
        handle, address = Handle(), ctypes.c_uint64()
        ctypes.memmove(ctypes.byref(handle), bytes.fromhex(text), 64)
        code = self.cuda.cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, ctypes.c_uint(1))
        if code == 0:
            self.others.append((address, int(length)))
        return f"open {code}"

    def close(self):
        """Closes the memory that was opened last."""
        return f"close {self.cuda.cuIpcCloseMemHandle(self.others.pop()[0])}"

    def check(self):
        """Reads three words of all memory."""
        for address, length in self.own + self.others:
            for offset in (0, length // 8 * 4, length - 4):
                value = ctypes.c_uint32()
                code = self.cuda.cuMemcpyDtoH_v2(ctypes.byref(value), ctypes.c_uint64(address.value + offset), ctypes.c_size_t(4))
                if code or value.value != PATTERN:
                    return f"wrong {code} {value.value:#x} at {offset} of {length}"
        return "intact"


class Children:
    """The processes by name."""

    def __init__(self):
        self.running = {}

    def start(self, name):
        """Starts a process."""
        command = [sys.executable, __file__, "process"]
        self.running[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        return self.running[name].stdout.readline().strip()

    def kill(self, name):
        """Kills a process."""
        child = self.running.pop(name)
        child.kill()
        child.wait()
        return "killed"

    def ask(self, name, *words):
        """Returns a process's answer."""
        child = self.running[name]
        try:
            child.stdin.write(" ".join(words) + "\n")
        except BrokenPipeError:
            pass
        return child.stdout.readline().strip() or f"exited {child.wait()}"

    def pass_on(self, source, target):
        """Lets one open the other's memory."""
        word, code, *rest = self.ask(source, "handle").split()
        return self.ask(target, "open", *rest) if (word, code) == ("handle", "0") else f"{word} {code}"

    def do(self, line):
        """Follows a line, and returns the answer."""
        match line.split():
            case ["start", name]:
                return self.start(name)
            case ["kill", name]:
                return self.kill(name)
            case ["pass", source, target]:
                return self.pass_on(source, target)
            case [name, *words]:
                return self.ask(name, *words)


def main():
    """See above."""
    if sys.argv[1:] == ["process"]:
        process = Process()
        answer = lambda line: getattr(process, line.split()[0])(*line.split()[1:])
        print("started", flush=True)
    else:
        children = Children()
        answer = children.do
    for line in sys.stdin:
        print(answer(line), flush=True)


if __name__ == "__main__":
    main()
