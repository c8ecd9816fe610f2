"""Single operations: rate of tiny launches, latency of item(), a process's first operations.

ops.py              rate and latency
ops.py first        time to the first CUDA operation and the first bf16 matrix product
"""

import statistics
import sys
import time

import common


def first():
    """Measures both parts and their sum, without the import of PyTorch."""
    import torch

    start = time.perf_counter()
    x = torch.ones(1024, 1024, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    middle = time.perf_counter()
    y = x @ x
    torch.cuda.synchronize()
    end = time.perf_counter()
    print("first product", y[0, 0].item(), y[1023, 1023].item())
    common.measure("first_op", (middle - start) * 1e3, "ms")
    common.measure("first_matmul", (end - middle) * 1e3, "ms")
    common.measure("first_op_and_matmul", (end - start) * 1e3, "ms")


def bench(quick):
    """The measurements of the table."""
    import torch

    z = torch.zeros(1, device="cuda")
    count = 20000 if quick else 50000

    def loop():
        for _ in range(count):
            z.add_(1)
        torch.cuda.synchronize()

    common.measure("launch_rate_python", count / common.timed(loop, 3, warm_up=1) / 1e3, "k/s")
    print("ops sum", z.item() == count * 4)
    taken = []
    for _ in range(3000 if quick else 10000):
        start = time.perf_counter()
        z.item()
        taken.append(time.perf_counter() - start)
    common.measure("item", statistics.median(taken[100:]) * 1e6, "us")
    taken.sort()
    common.measure("item_p99", taken[len(taken) * 99 // 100] * 1e6, "us")


if __name__ == "__main__":
    if sys.argv[1:] == ["first"]:
        first()
    else:
        bench(quick=True)
