"""PyTorch: sums by a kernel that reads the other GPUs' memory; needs two GPUs and nvcc.

Inference servers sum like this. Each process opens the others' memory by handles of
cudaIpcGetMemHandle, and that of a CUDA graph's inputs after the capture. `--times` prints times.
"""

import ctypes
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import common  # noqa: E402

torch = common.need("torch")[0]
dist = torch.distributed

COUNT, NUMBERS, EAGER, REPLAYS, LAYERS = 2, 2048, 1000, 200, 8
SOURCE = pathlib.Path(__file__).resolve().parent / "custom_all_reduce.cu"


class Sums:
    """The library's sums over all ranks."""

    def __init__(self, path, rank, count):
        self.rank, self.count, self.opened = rank, count, {}
        self.library = library = ctypes.CDLL(path)
        pointer = ctypes.c_void_p
        for name, result, *arguments in (
            ("create", pointer, ctypes.c_int, ctypes.c_int),
            ("handle_of", ctypes.c_size_t, pointer, pointer),
            ("open_handle", pointer, pointer),
            ("close_handle", None, pointer),
            ("own_buffer", pointer, pointer),
            ("set_buffer", None, pointer, ctypes.c_int, pointer),
            ("finish_buffers", None, pointer),
            ("all_reduce", None, pointer, pointer, pointer, ctypes.c_int, pointer),
            ("first_new", ctypes.c_int, pointer),
            ("end_new", ctypes.c_int, pointer),
            ("captured_input", pointer, pointer, ctypes.c_int),
            ("register_input", None, pointer, ctypes.c_int, pointer),
            ("failure", ctypes.c_uint, pointer),
            ("destroy", None, pointer),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.state = library.create(rank, count)
        for other, addresses in enumerate(self.exchange([library.own_buffer(self.state)])):
            if other != rank:
                library.set_buffer(self.state, other, addresses[0])
        library.finish_buffers(self.state)
        dist.barrier()

    def exchange(self, addresses):
        """Returns each rank's addresses as this process finds them; each rank passes its own."""
        own = []
        for address in addresses:
            handle = ctypes.create_string_buffer(64)
            own.append((self.library.handle_of(address, handle), handle.raw))
        every = [None] * self.count
        dist.all_gather_object(every, own)
        found = []
        for other, entries in enumerate(every):
            found.append(list(addresses) if other == self.rank else [self.open(*entry) for entry in entries])
        return found

    def open(self, offset, handle):
        """Returns an address in another process's memory, which is opened once."""
        if handle not in self.opened:
            self.opened[handle] = self.library.open_handle(ctypes.create_string_buffer(handle, 64))
        return self.opened[handle] + offset

    def __call__(self, tensor):
        """Returns the sum of a tensor over all ranks."""
        out = torch.empty_like(tensor)
        stream = torch.cuda.current_stream().cuda_stream
        self.library.all_reduce(self.state, tensor.data_ptr(), out.data_ptr(), tensor.numel(), stream)
        return out

    def register(self):
        """Tells the captured sums where the inputs of all ranks are."""
        entries = range(self.library.first_new(self.state), self.library.end_new(self.state))
        found = self.exchange([self.library.captured_input(self.state, entry) for entry in entries])
        for number, entry in enumerate(entries):
            addresses = (ctypes.c_void_p * self.count)(*(every[number] for every in found))
            self.library.register_input(self.state, entry, addresses)
        torch.cuda.synchronize()
        dist.barrier()
        return len(entries)

    def check(self, what):
        """Ends the program if a rank has waited in vain."""
        if meeting := self.library.failure(self.state):
            wrong(self.rank, f"{what}: no answer of another rank at meeting {meeting}")

    def close(self):
        """Closes the others' memory, and frees its own once no process has it open."""
        torch.cuda.synchronize()
        dist.barrier()
        for opened in self.opened.values():
            self.library.close_handle(opened)
        dist.barrier()
        self.library.destroy(self.state)


def wrong(rank, what):
    """Ends the program with what was wrong; the other rank may wait for this one."""
    print(f"rank {rank}: wrong: {what}", flush=True)
    os._exit(1)


def numbers_of(rank, turn):
    """Returns whole numbers that differ from rank to rank and from turn to turn."""
    return (torch.arange(NUMBERS, device="cuda", dtype=torch.float32) * (rank + 3) + 17 * turn).remainder_(1009)


def before_sum(value, rank, layer):
    """A layer of a rank, up to the sum."""
    return (value * (3 + layer) + (7 * rank + layer)).remainder_(251)


def expected_of(turn, count):
    """Returns what the graph computes, without other processes."""
    values = [numbers_of(rank, turn) for rank in range(count)]
    for layer in range(LAYERS):
        total = sum(before_sum(value, rank, layer) for rank, value in enumerate(values))
        values = [total.remainder(127)] * count
    return values[0]


def eager(sums, rank, count):
    """Sums other numbers in each turn."""
    for turn in range(EAGER):
        expected = sum(numbers_of(other, turn) for other in range(count))
        if not torch.equal(sums(numbers_of(rank, turn)), expected):
            sums.check(f"eager sum {turn}")
            wrong(rank, f"eager sum {turn}")
    sums.check("eager sums")


def captured(sums, rank):
    """Captures layers with a sum in each; returns the graph, its input and its result."""
    value = numbers_of(rank, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = value
        for layer in range(LAYERS):
            result = sums(before_sum(result, rank, layer)).remainder(127)
    found = sums.register()
    if found != LAYERS:
        wrong(rank, f"{found} sums captured")
    return graph, value, result


def replayed(sums, rank, count, graph, value, result):
    """Replays the graph, the second half without a wait between replays."""
    results = torch.empty(REPLAYS, NUMBERS, device="cuda")
    for turn in range(REPLAYS):
        value.copy_(numbers_of(rank, turn))
        graph.replay()
        results[turn].copy_(result)
        if turn < REPLAYS // 2:
            torch.cuda.synchronize()
    sums.check("replays")
    for turn in range(REPLAYS):
        if not torch.equal(results[turn], expected_of(turn, count)):
            wrong(rank, f"replay {turn}")
    return common.digest(results)


def times(sums, rank, graph):
    """Measures a sum, eagerly and as a part of the graph's layers."""
    value = numbers_of(rank, 0)
    for name, run, each in (("eager_sum", lambda: sums(value), 1), ("graph_layer", graph.replay, LAYERS)):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(200):
            run()
        torch.cuda.synchronize()
        if rank == 0:
            common.measure(name, (time.perf_counter() - start) / 200 / each * 1e6, "us")


def work(rank, count, port, library, with_times):
    """One rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo")
    sums = Sums(library, rank, count)
    eager(sums, rank, count)
    graph, value, result = captured(sums, rank)
    digest = replayed(sums, rank, count, graph, value, result)
    if rank == 0:
        print(f"{EAGER} eager sums right")
        print(f"{REPLAYS} replays of {LAYERS} sums right: {digest}", flush=True)
    if with_times:
        times(sums, rank, graph)
        sums.check("times")
    sums.close()
    dist.destroy_process_group()


def compiled(folder):
    """Returns the library's path."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if not nvcc:
        common.skip("needs nvcc")
    path = os.path.join(folder, "libcustom_all_reduce.so")
    code = ["-gencode", "arch=compute_90,code=sm_90", "-gencode", "arch=compute_90,code=compute_90"]
    command = [nvcc, "-std=c++17", "-O2", *code, "-shared", "-Xcompiler", "-fPIC", "-o", path, str(SOURCE)]
    subprocess.run(command, check=True)
    return path


def main():
    """Compiles the library, and starts the ranks."""
    if torch.cuda.device_count() < COUNT:
        common.skip("needs two GPUs")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        library = compiled(folder)
        torch.multiprocessing.spawn(work, args=(COUNT, port, library, "--times" in sys.argv[1:]), nprocs=COUNT)
    print(f"{COUNT} ranks right")


if __name__ == "__main__":
    main()
