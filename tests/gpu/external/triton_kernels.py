"""Triton: elementwise kernel, softmax, atomics, matrix product, benchmark, CUDA graph."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import common  # noqa: E402

torch, triton = common.need("torch", "triton")
tl = common.need("triton.language")[0]


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    """Adds two vectors."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def softmax_kernel(x, out, columns, BLOCK: tl.constexpr):
    """Normalises one row."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + at, mask=at < columns, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row * columns + at, powers / tl.sum(powers, axis=0), mask=at < columns)


@triton.jit
def count_kernel(x, bins, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Counts values by atomic additions."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n, other=0)
    tl.atomic_add(bins + values % BINS, 1, mask=at < n)


@triton.jit
def matmul_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Multiplies row-major matrices of half precision; all sizes are multiples of the blocks."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        left = tl.load(a + rows[:, None] * K + (k + inner)[None, :])
        right = tl.load(b + (k + inner)[:, None] * N + columns[None, :])
        total += tl.dot(left, right)
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(tl.float16))


def matmul(a, b, bm, bn, bk):
    """Multiplies with blocks of the given sizes."""
    out = torch.empty(a.shape[0], b.shape[1], device="cuda", dtype=torch.float16)
    grid = (a.shape[0] // bm, b.shape[1] // bn)
    matmul_kernel[grid](a, b, out, a.shape[0], b.shape[1], a.shape[1], BM=bm, BN=bn, BK=bk)
    return out


def main():
    """Compares each kernel with PyTorch."""
    common.measure("version", triton.__version__, "Triton")
    torch.manual_seed(1)
    x, y = torch.randn(100_003, device="cuda"), torch.randn(100_003, device="cuda")
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
    common.expect("add", torch.equal(out, x + y), common.digest(out))
    rows = torch.randn(500, 1000, device="cuda")
    out = torch.empty_like(rows)
    softmax_kernel[(500,)](rows, out, 1000, BLOCK=1024)
    common.expect("softmax", torch.allclose(out, torch.softmax(rows, 1), atol=1e-6), common.digest(out))
    values = torch.randint(0, 1 << 20, (50_000,), device="cuda", dtype=torch.int32)
    bins = torch.zeros(64, device="cuda", dtype=torch.int32)
    count_kernel[(triton.cdiv(values.numel(), 256),)](values, bins, values.numel(), BINS=64, BLOCK=256)
    want = torch.bincount((values % 64).long(), minlength=64).int()
    common.expect("atomic additions", torch.equal(bins, want), common.digest(bins))
    a = torch.randn(512, 256, device="cuda", dtype=torch.float16)
    b = torch.randn(256, 384, device="cuda", dtype=torch.float16)
    want = (a.float() @ b.float()).half()
    for sizes in ((32, 32, 32), (64, 64, 32), (128, 128, 64)):
        out = matmul(a, b, *sizes)
        near = torch.allclose(out, want, rtol=1e-2, atol=2e-1)
        common.expect(f"matrix product, blocks of {sizes[0]}", near, common.digest(out))
    best = triton.testing.do_bench(lambda: matmul(a, b, 64, 64, 32), warmup=10, rep=50)
    common.measure("triton_matmul", best * 1e3, "us")
    graph, static = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        add_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, static, x.numel(), BLOCK=1024)
    x += 1
    graph.replay()
    common.expect("in a CUDA graph", torch.equal(static, x + y), common.digest(static))
    return 0


if __name__ == "__main__":
    sys.exit(main())
