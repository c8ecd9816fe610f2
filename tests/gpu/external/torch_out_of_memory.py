"""PyTorch: eight processes fill the card together, catch the error, and continue.

The allocation has to fail, as torch.cuda.OutOfMemoryError; a synchronization or kernel must not.
"""

import multiprocessing
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import common  # noqa: E402

torch = common.need("torch")[0]

PROCESSES, PIECE, ROUNDS = 8, 256 << 20, 30


def allocate(number, pieces):
    """Adds a piece of memory; returns False if there is none, and raises any other error."""
    try:
        piece = torch.empty(PIECE // 4, device="cuda", dtype=torch.int32)
    except torch.cuda.OutOfMemoryError:
        return False
    # Outside of the try: the memory exists, so that writing to it cannot fail.
    piece.fill_(number)
    torch.cuda.synchronize()
    pieces.append(piece)
    return True


def work(number, answers, barrier):
    """Fills the card with the others, then computes while memory is short."""
    step, pieces, errors = "start", [], 0
    try:
        torch.manual_seed(number)
        a = torch.randn(512, 512, device="cuda")
        out, want = torch.empty_like(a), (a @ a).cpu()
        barrier.wait(50)
        step = "filling the card"
        while allocate(number, pieces):
            pass
        errors += 1
        # No process gives memory back before each has seen the error.
        barrier.wait(50)
        for count in range(ROUNDS):
            step = f"round {count}"
            if count % 5 == 0 and pieces:
                pieces.pop()
                torch.cuda.empty_cache()
            errors += not allocate(number, pieces)
            torch.matmul(a, a, out=out)
            # On the host, since a comparison on the card would need memory.
            if not torch.equal(out.cpu(), want):
                raise ValueError("a product is wrong")
        step = "reading the memory"
        wrong = sum(int(piece[at].item() != number) for piece in pieces for at in (0, len(piece) // 2, -1))
        if wrong:
            raise ValueError(f"{wrong} of {3 * len(pieces)} numbers are wrong")
        answers.put((number, "", errors))
    except Exception as error:
        barrier.abort()
        answers.put((number, f"{step}: {type(error).__name__}: {str(error)[:200]}", errors))


def main():
    """Starts the processes, and prints how each ended."""
    common.measure("version", torch.__version__, "PyTorch")
    barrier = multiprocessing.get_context("spawn").Barrier(PROCESSES)
    for number, why, errors in common.in_processes(work, PROCESSES, barrier):
        common.measure(f"errors_{number}", errors, "errors")
        common.expect(f"process {number}: caught the error and continued", not why and errors > 0, why)
    return 0


if __name__ == "__main__":
    sys.exit(main())
