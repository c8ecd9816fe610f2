"""CuPy: generated and own kernels, reductions, FFT, linear algebra, sparse matrices, memory."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import common  # noqa: E402

cupy, np = common.need("cupy", "numpy")

SOURCE = r"""
extern "C" __global__ void scaled_sum(const float* a, const float* b, float* out, float factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = factor * a[i] + b[i];
}
__device__ int table[4];
extern "C" __global__ void look_up(int* out) { out[threadIdx.x] = table[threadIdx.x & 3] * 2; }
template <typename T> __global__ void twice(T* values) { values[threadIdx.x] *= 2; }
"""


def near(got, want, tolerance):
    """Returns whether a result is near NumPy's, and its bytes."""
    got = cupy.asnumpy(got)
    right = np.allclose(got, want, rtol=tolerance, atol=tolerance)
    return right, np.ascontiguousarray(got).tobytes()


def show(name, got, want, tolerance=1e-4):
    """Compares with NumPy, and prints the checksum of the result, whose bits are always alike."""
    right, data = near(got, want, tolerance)
    common.expect(name, right, common.digest_of_bytes(data))


@cupy.fuse()
def root_of_sum(v, w):
    """Becomes one kernel."""
    return cupy.sqrt(v * v + w)


def check(name, got, want):
    """Compares with NumPy; the order of a library's sums may vary."""
    common.expect(name, near(got, want, 1e-4)[0])


def elementwise(x, a):
    """Runs generated kernels, reductions, scans and sorts."""
    show("elementwise", cupy.sin(x) * 2 + x**2, np.sin(a) * 2 + a**2)
    kernel = cupy.ElementwiseKernel("T x, T y", "T z", "z = x > y ? x - y : y * 2", "chosen")
    show("ElementwiseKernel", kernel(x, x[::-1]), np.where(a > a[::-1], a - a[::-1], a[::-1] * 2))
    norm = cupy.ReductionKernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0", "row_norm")
    show("ReductionKernel", norm(x, axis=1), np.sqrt((a * a).sum(1)), 1e-3)
    show("fuse", root_of_sum(x, x * x), np.sqrt(2 * a * a), 1e-3)
    for name in ("sum", "max", "argmin", "mean", "std"):
        show(name, getattr(cupy, name)(x, axis=0), getattr(np, name)(a, axis=0), 1e-3)
    show("cumsum", cupy.cumsum(x, axis=1), np.cumsum(a, axis=1), 1e-2)
    show("sort", cupy.sort(x, axis=1), np.sort(a, axis=1))
    show("argsort", x.ravel()[cupy.argsort(x.ravel())], np.sort(a.ravel()))
    show("unique", cupy.unique(cupy.floor(x)), np.unique(np.floor(a)))
    show("boolean index", x[x > 1.0], a[a > 1.0])
    show("histogram", cupy.histogram(x, bins=cupy.linspace(-3, 3, 20))[0], np.histogram(a, bins=np.linspace(-3, 3, 20))[0])


def own_kernels(x, a):
    """Runs kernels of C++ source: constants, templates and several streams."""
    kernel = cupy.RawKernel(SOURCE, "scaled_sum", ("-std=c++17",))
    out = cupy.empty_like(x)
    kernel((x.size // 256 + 1,), (256,), (x, x, out, np.float32(3), np.int32(x.size)))
    show("RawKernel", out, 4 * a)
    module = cupy.RawModule(code=SOURCE, options=("-std=c++17",), name_expressions=["twice<double>", "twice<int>"])
    values = cupy.arange(32, dtype=np.float64)
    module.get_function("twice<double>")((1,), (32,), (values,))
    show("template", values, np.arange(32) * 2.0)
    table = cupy.ndarray(4, dtype=np.int32, memptr=module.get_global("table"))
    table[:] = cupy.asarray([3, 5, 7, 9], dtype=np.int32)
    found = cupy.empty(8, dtype=np.int32)
    module.get_function("look_up")((1,), (8,), (found,))
    show("variable of a module", found, np.array([6, 10, 14, 18] * 2))
    streams, parts = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)], []
    cupy.cuda.Device().synchronize()
    for number, stream in enumerate(streams):
        with stream:
            part = x + number
            for _ in range(50):
                kernel((part.size // 256 + 1,), (256,), (part, x, part, np.float32(0.5), np.int32(part.size)))
            parts.append(part)
    for number, (stream, part) in enumerate(zip(streams, parts)):
        stream.synchronize()
        show(f"stream {number}", part, 2 * a, 1e-3)
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    cupy.sin(x)
    end.record()
    end.synchronize()
    common.expect("events", cupy.cuda.get_elapsed_time(begin, end) >= 0)


def memory(x, a):
    """Uses pinned and managed memory, the pools, and copies of all kinds."""
    pinned = cupy.cuda.alloc_pinned_memory(a.nbytes)
    host = np.frombuffer(pinned, a.dtype, a.size).reshape(a.shape)
    host[...] = a
    stream = cupy.cuda.Stream(non_blocking=True)
    there = cupy.empty_like(x)
    there.set(host, stream=stream)
    with stream:
        there *= 2
    there.get(stream=stream, out=host)
    stream.synchronize()
    show("pinned memory", host, 2 * a)
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    block = cupy.zeros(1 << 24, dtype=np.uint8)
    grown = pool.used_bytes() - before
    del block
    common.expect("memory pool", grown == 1 << 24 and pool.used_bytes() == before, grown)
    pool.free_all_blocks()
    with cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc):
        show("asynchronous pool", cupy.arange(1000) * 3, np.arange(1000) * 3)
        cupy.cuda.Device().synchronize()
    with cupy.cuda.using_allocator(cupy.cuda.malloc_managed):
        managed = cupy.arange(1000, dtype=np.float32)
        show("managed memory", managed + 1, np.arange(1000) + 1.0)
    show("transposed copy", cupy.ascontiguousarray(x.T), a.T)
    try:
        cupy.empty(1 << 46, dtype=np.uint8)
        refused = False
    except cupy.cuda.memory.OutOfMemoryError:
        refused = True
    common.expect("out of memory", refused)


def graph(x, a):
    """Captures kernels, and replays the graph with other data."""
    stream, out = cupy.cuda.Stream(non_blocking=True), cupy.zeros_like(x)
    cupy.multiply(x, 2, out=out)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cupy.multiply(x, 2, out=out)
        cupy.add(out, 1, out=out)
        captured = stream.end_capture()
        for _ in range(10):
            x += 1
            captured.launch()
    stream.synchronize()
    show("graph", out, 2 * (a + 10) + 1, 1e-3)


def libraries(x, a):
    """Runs cuBLAS, cuFFT, cuSOLVER, cuSPARSE and cuRAND."""
    cusparse = common.need("cupyx.scipy.sparse")[0]
    square = a[:, : a.shape[0]].astype(np.float64)
    y = cupy.asarray(square)
    symmetric = y @ y.T + a.shape[0] * cupy.eye(a.shape[0])
    right = square @ square.T + a.shape[0] * np.eye(a.shape[0])
    show("matmul", symmetric, right)
    show("einsum", cupy.einsum("ij,kj->ik", y, y), square @ square.T)
    show("fft", cupy.fft.fft(x, axis=1), np.fft.fft(a, axis=1), 1e-2)
    show("ifft2", cupy.fft.ifft2(cupy.fft.fft2(x)).real, a, 1e-3)
    check("cholesky", cupy.linalg.cholesky(symmetric), np.linalg.cholesky(right))
    check("solve", cupy.linalg.solve(symmetric, y[:, 0]), np.linalg.solve(right, square[:, 0]))
    check("eigvalsh", cupy.linalg.eigvalsh(symmetric), np.linalg.eigvalsh(right))
    u, s, v = cupy.linalg.svd(y)
    check("svd", (u * s) @ v, square)
    check("qr", cupy.matmul(*cupy.linalg.qr(y)), square)
    thin = cupy.where(y > 1, y, 0)
    csr = cusparse.csr_matrix(thin)
    check("sparse: vector", csr @ y[:, 0], np.where(square > 1, square, 0) @ square[:, 0])
    check("sparse: matrix", (csr @ csr).toarray(), np.linalg.matrix_power(np.where(square > 1, square, 0), 2))
    check("sparse: transposed", csr.T.tocsr().toarray(), np.where(square > 1, square, 0).T)
    cupy.random.seed(5)
    drawn = cupy.asnumpy(cupy.random.standard_normal(100_000))
    common.expect("random", abs(drawn.mean()) < 0.02 and abs(drawn.std() - 1) < 0.02, common.digest_of_bytes(drawn.tobytes()))


def main():
    """Runs all parts."""
    common.measure("version", cupy.__version__, "CuPy")
    a = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    x = cupy.asarray(a)
    for part in (elementwise, own_kernels, memory, graph, libraries):
        if len(sys.argv) < 2 or part.__name__ in sys.argv:
            part(x.copy(), a)
    return 0


if __name__ == "__main__":
    sys.exit(main())
