"""PyTorch: several processes with several threads each, and many libraries at a time.

Looks for errors that appear only under load: illegal instructions and addresses, wrong results.
With STRESS_SECONDS in the environment, it repeats its rounds for that time.
"""

import os
import pathlib
import sys
import threading
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import common  # noqa: E402

torch = common.need("torch")[0]

PROCESSES, THREADS, ROUNDS = 4, 4, 60
SECONDS = float(os.environ.get("STRESS_SECONDS", "0"))


def operations(generator):
    """Returns operations of many libraries, by name; each returns a tensor."""
    a = torch.randn(256, 256, generator=generator).cuda()
    half = a.half()
    image = torch.randn(4, 8, 64, 64, generator=generator).cuda()
    filters = torch.randn(16, 8, 3, 3, generator=generator).cuda()
    positive = a @ a.T + 256 * torch.eye(256, device="cuda")
    sparse = torch.where(a > 1.5, a, 0).to_sparse_csr()
    numbers = torch.randint(0, 1 << 30, (200_000,), generator=generator).cuda()
    return {
        "cublas": lambda: a @ a,
        "cublasLt": lambda: torch.nn.functional.linear(half, half, half[0]),
        "cudnn": lambda: torch.nn.functional.conv2d(image, filters, padding=1),
        "cufft": lambda: torch.view_as_real(torch.fft.fft2(image)),
        "cusolver": lambda: torch.linalg.cholesky(positive),
        "cusparse": lambda: sparse @ a,
        "sort": lambda: numbers.sort().values,
        "scan": lambda: numbers.cumsum(0),
        "index": lambda: a[numbers[:4096] % 256, numbers[4096:8192] % 256],
        "attention": lambda: torch.nn.functional.scaled_dot_product_attention(*([half.view(1, 4, 64, 256)] * 3)),
        "host": lambda: (a.cpu().pin_memory().cuda(non_blocking=True) * 2),
        "random": lambda: torch.rand(1000, device="cuda", generator=torch.Generator("cuda").manual_seed(1)),
    }


def thread(seed, failures):
    """Repeats all operations in a stream of its own; the results stay near the first ones."""
    try:
        made = operations(torch.Generator().manual_seed(seed))
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            first = {name: operation().clone() for name, operation in made.items()}
            end, count = time.monotonic() + SECONDS, 0
            while count < ROUNDS or time.monotonic() < end and not failures:
                got = {name: operation() for name, operation in made.items()}
                for name in (name for name in got if (count + len(name)) % 4 == 0):
                    if not torch.allclose(got[name].float(), first[name].float(), rtol=1e-2, atol=1e-2):
                        failures.append(f"{name} in round {count}")
                # Memory of other sizes, so that the allocator splits and frees blocks.
                torch.empty(1 << (10 + count % 14), device="cuda", dtype=torch.uint8).fill_(count % 256)
                if count % 20 == 19:
                    torch.cuda.empty_cache()
                count += 1
            torch.cuda.current_stream().synchronize()
    except Exception as error:
        failures.append(f"{type(error).__name__}: {str(error)[:200]}")


def work(number, answers):
    """Runs the threads of one process."""
    common.deterministic()
    # PyTorch's own lazy loading of linear algebra allows no two threads.
    for operation in operations(torch.Generator().manual_seed(number)).values():
        operation()
    failures = []
    threads = [threading.Thread(target=thread, args=(100 * number + index, failures)) for index in range(THREADS)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    answers.put((number, failures))


def main():
    """Starts the processes, and prints the failures of each."""
    common.measure("version", torch.__version__, "PyTorch")
    for number, failures in common.in_processes(work, PROCESSES):
        common.expect(f"process {number}: {THREADS} threads, at least {ROUNDS} rounds", not failures, *failures[:3])
    return 0


if __name__ == "__main__":
    sys.exit(main())
