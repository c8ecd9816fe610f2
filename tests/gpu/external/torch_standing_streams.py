"""PyTorch: copies beside streams that stand still; more bytes wait than a worker has slots for."""

import pathlib
import sys
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import common  # noqa: E402

torch = common.need("torch")[0]

NUMBERS = 32 << 20
SMALL = 1 << 20
# Cycles of the kernels before the large copies: more than 2 s.
CYCLES = 5_000_000_000


def pinned(numbers):
    """Returns zeros in pinned memory."""
    return torch.zeros(numbers, dtype=torch.int32).pin_memory()


def main():
    """Copies 4 MiB there and back while 128 MiB in each direction wait for kernels."""
    ascending = torch.arange(NUMBERS, dtype=torch.int32)
    up, down, back = ascending.pin_memory(), pinned(NUMBERS), pinned(SMALL)
    there, source = torch.zeros(NUMBERS, dtype=torch.int32, device="cuda"), ascending.cuda()
    small = torch.zeros(SMALL, dtype=torch.int32, device="cuda")
    to, from_, beside = (torch.cuda.Stream() for _ in range(3))
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    for stream in (to, from_):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
    with torch.cuda.stream(to):
        there.copy_(up, non_blocking=True)
    with torch.cuda.stream(from_):
        down.copy_(source, non_blocking=True)
    begin = time.monotonic()
    with torch.cuda.stream(beside):
        small.copy_(up[:SMALL], non_blocking=True)
        back.copy_(small, non_blocking=True)
    beside.synchronize()
    taken, waits = time.monotonic() - begin, not to.query() and not from_.query()
    torch.cuda.synchronize()
    print("copies passed the streams", waits and taken < 1.5)
    right = torch.equal(back, ascending[:SMALL]) and torch.equal(there.cpu(), ascending) and torch.equal(down, ascending)
    common.expect("copies", right)


if __name__ == "__main__":
    main()
