"""PyTorch: sparse products in two threads, each with a stream of its own, 500 times."""

import pathlib
import sys
import threading

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import common  # noqa: E402

torch = common.need("torch")[0]

ROUNDS = 500


def work(number, failures):
    """Multiplies a matrix of this thread in its stream; each product is checked."""
    try:
        generator = torch.Generator().manual_seed(number)
        dense = torch.randn(300, 400, generator=generator)
        dense[dense < 1] = 0
        factor = torch.randn(400, 64, generator=generator)
        want = (dense @ factor).cuda()
        with torch.cuda.stream(torch.cuda.Stream()):
            csr, coo, factor = dense.cuda().to_sparse_csr(), dense.cuda().to_sparse_coo(), factor.cuda()
            for count in range(ROUNDS):
                product = (csr if count % 2 else coo) @ factor
                # The host reads the result in some rounds only: in the others, work piles up.
                if count % 10 == 0 and not torch.allclose(product, want, rtol=1e-3, atol=1e-3):
                    failures.append(f"round {count}: off by {(product - want).abs().max().item()}")
            torch.cuda.current_stream().synchronize()
    except Exception as error:
        failures.append(f"{type(error).__name__}: {str(error)[:200]}")


def main():
    """Runs both threads at a time."""
    common.measure("version", torch.__version__, "PyTorch")
    failures = [[], []]
    threads = [threading.Thread(target=work, args=(number, failures[number])) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, found in enumerate(failures):
        common.expect(f"thread {number}: {ROUNDS} sparse products", not found, *found[:3])
    return 0


if __name__ == "__main__":
    sys.exit(main())
