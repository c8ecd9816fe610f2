"""Shared code of the Python scripts: measurements, results, and deterministic settings.

A line that starts with `{` is a measurement, and differs from run to run. Every other line of
standard output is a result, and must be equal on a remote GPU and on a local one.
"""

import hashlib
import importlib
import json
import os
import statistics
import sys
import time

# cuBLAS reads it when it starts, so it is set before PyTorch is imported.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def measure(name, value, unit, **more):
    """Prints one measurement."""
    print(json.dumps({"name": name, "value": value, "unit": unit, **more}), flush=True)


def skip(reason):
    """Exits with the status of a program that cannot run here."""
    print(reason)
    sys.exit(77)


def need(*names):
    """Returns modules; if one is missing, the program cannot run here."""
    try:
        return [importlib.import_module(name) for name in names]
    except ImportError as error:
        return skip(f"needs {', '.join(names)}: {error}")


def expect(name, right, *values):
    """Prints a result; one that is wrong ends the program."""
    print(name, "right" if right else "WRONG", *values, flush=True)
    if not right:
        sys.exit(f"{name}: wrong")


def digest_of_bytes(data):
    """Returns a short checksum of bytes, which any changed bit changes."""
    return hashlib.sha256(data).hexdigest()[:16]


def digest(tensor):
    """Returns a short checksum of a tensor's bytes, which any changed bit changes."""
    import torch

    flat = tensor.detach().contiguous().cpu().flatten().view(torch.uint8)
    return digest_of_bytes(flat.numpy().tobytes())


def deterministic():
    """Makes PyTorch choose algorithms whose result does not depend on timing."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_math_sdp(True)


def timed(function, repeat, warm_up=3):
    """Returns the median wall-clock seconds of a function that synchronizes at its end."""
    for _ in range(warm_up):
        function()
    taken = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def in_processes(work, count, *arguments):
    """Runs `work(number, answers, *arguments)` in new processes; prints whether each exited well.

    Returns the answers that they put into the queue, sorted.
    """
    import multiprocessing
    import queue

    context = multiprocessing.get_context("spawn")
    answers, found = context.Queue(), []
    children = [context.Process(target=work, args=(number, answers, *arguments), daemon=True) for number in range(count)]
    for child in children:
        child.start()
    while any(child.is_alive() for child in children) or not answers.empty():
        try:
            found.append(answers.get(timeout=0.5))
        except queue.Empty:
            pass
    codes = [child.exitcode for child in children]
    expect(f"{count} processes exit", codes == [0] * count and len(found) == count, codes, len(found))
    return sorted(found)


def rendezvous():
    """Waits for the measurement's other processes; the environment names folder and number."""
    folder, _, count = os.environ.get("RENDEZVOUS", "").rpartition(":")
    if folder:
        open(os.path.join(folder, str(os.getpid())), "w", encoding="utf-8").close()
        end = time.monotonic() + 120
        while len(os.listdir(folder)) < int(count) and time.monotonic() < end:
            time.sleep(0.001)


class Steps:
    """Measures time and processor time of a training loop's steps; the first ones do not count."""

    def __init__(self, warm_up):
        self.warm_up, self.taken, self.cpu = warm_up, [], []
        self.mark = self.cpu_mark = None

    def tick(self):
        """Call once before the first step and after every step."""
        wall, cpu = time.perf_counter(), time.process_time()
        if self.mark is not None:
            self.taken.append(wall - self.mark)
            self.cpu.append(cpu - self.cpu_mark)
        if len(self.taken) == self.warm_up:
            rendezvous()
        self.mark, self.cpu_mark = time.perf_counter(), time.process_time()

    def report(self, name):
        """Print the medians in milliseconds."""
        if len(self.taken) > self.warm_up:
            measure(f"{name}_step", statistics.median(self.taken[self.warm_up :]) * 1e3, "ms")
            # The mean, since the clock of processor time may be coarse.
            measure(f"{name}_step_cpu", statistics.mean(self.cpu[self.warm_up :]) * 1e3, "ms")
