"""Numba: kernels, shared memory, atomics, streams, events, mapped, pinned and managed arrays."""

import os
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import common  # noqa: E402

# Small kernels and arrays of the host are on purpose.
os.environ.update(NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS="0", NUMBA_CUDA_WARN_ON_IMPLICIT_COPY="0")
numba, np = common.need("numba", "numpy")
cuda, math = common.need("numba.cuda", "math")

THREADS = 128


@cuda.jit
def add(a, b, out):
    """Adds two arrays."""
    i = cuda.grid(1)
    if i < out.size:
        out[i] = a[i] + b[i]


@cuda.jit
def matmul(a, b, out):
    """Multiplies matrices by tiles in shared memory."""
    left = cuda.shared.array((16, 16), numba.float32)
    right = cuda.shared.array((16, 16), numba.float32)
    x, y = cuda.grid(2)
    i, j = cuda.threadIdx.x, cuda.threadIdx.y
    total = numba.float32(0)
    for tile in range(a.shape[1] // 16):
        left[i, j] = a[x, tile * 16 + j]
        right[i, j] = b[tile * 16 + i, y]
        cuda.syncthreads()
        for k in range(16):
            total += left[i, k] * right[k, j]
        cuda.syncthreads()
    out[x, y] = total


@cuda.jit
def histogram(values, bins):
    """Counts values by atomic additions."""
    i = cuda.grid(1)
    if i < values.size:
        cuda.atomic.add(bins, values[i] % bins.size, 1)


@cuda.jit
def largest(values, out):
    """Finds the largest value."""
    i = cuda.grid(1)
    if i < values.size:
        cuda.atomic.max(out, 0, values[i])


@cuda.jit(device=True)
def square(x):
    """Returns a square."""
    return x * x


@cuda.jit
def norms(points, out):
    """Calls a device function and the mathematical library."""
    i = cuda.grid(1)
    if i < out.size:
        out[i] = math.sqrt(square(points[i, 0]) + square(points[i, 1])) + math.sin(points[i, 0])


@cuda.jit
def scale(values, factor):
    """Multiplies in place."""
    i = cuda.grid(1)
    if i < values.size:
        values[i] *= factor


def show(name, got, want, tolerance=1e-4):
    """Compares with NumPy, and prints the checksum of the result."""
    got = np.ascontiguousarray(got)
    near = np.allclose(got, want, rtol=tolerance, atol=tolerance)
    common.expect(name, near, common.digest_of_bytes(got.tobytes()))


def blocks(size):
    """Returns the number of blocks for a number of threads."""
    return (size + THREADS - 1) // THREADS


def kernels(a):
    """Runs each kernel once."""
    out = np.zeros_like(a)
    add[blocks(a.size), THREADS](a, a, out)
    show("host arrays", out, 2 * a)
    m = a[: 64 * 64].reshape(64, 64)
    product = cuda.device_array((64, 64), np.float32)
    matmul[(4, 4), (16, 16)](cuda.to_device(m), cuda.to_device(m), product)
    show("shared memory", product.copy_to_host(), m @ m, 1e-3)
    values = np.arange(10_000, dtype=np.int64) * 7919 % 1009
    bins = cuda.to_device(np.zeros(32, np.int64))
    histogram[blocks(values.size), THREADS](cuda.to_device(values), bins)
    show("atomic additions", bins.copy_to_host(), np.bincount(values % 32, minlength=32))
    best = cuda.to_device(np.full(1, -1e30, np.float32))
    largest[blocks(a.size), THREADS](cuda.to_device(a), best)
    show("atomic maximum", best.copy_to_host(), a.max())
    points = a.reshape(-1, 2)
    length = cuda.device_array(len(points), np.float32)
    norms[blocks(len(points)), THREADS](cuda.to_device(points), length)
    show("device function", length.copy_to_host(), np.hypot(points[:, 0], points[:, 1]) + np.sin(points[:, 0]), 1e-3)

    @numba.vectorize(["float32(float32, float32)"], target="cuda")
    def distance(x, y):
        return abs(x - y)

    show("vectorize", distance(a, a[::-1].copy()), np.abs(a - a[::-1]))
    total = cuda.reduce(lambda x, y: x + y)
    common.expect("reduce", total(np.arange(5000, dtype=np.int64)) == 5000 * 4999 // 2)


def memory(a):
    """Uses streams, events, and memory that host and device share."""
    streams = [cuda.stream() for _ in range(4)]
    pinned = [cuda.pinned_array(a.size, np.float32) for _ in streams]
    for number, (stream, host) in enumerate(zip(streams, pinned)):
        host[:] = a + number
        there = cuda.to_device(host, stream=stream)
        for _ in range(20):
            scale[blocks(a.size), THREADS, stream](there, np.float32(0.5))
            scale[blocks(a.size), THREADS, stream](there, np.float32(2))
        there.copy_to_host(host, stream=stream)
    for number, (stream, host) in enumerate(zip(streams, pinned)):
        stream.synchronize()
        show(f"stream {number}", host, a + number)
    begin, end = cuda.event(), cuda.event()
    there = cuda.to_device(a)
    begin.record()
    scale[blocks(a.size), THREADS](there, np.float32(3))
    end.record()
    end.synchronize()
    common.expect("events", cuda.event_elapsed_time(begin, end) >= 0)
    show("after events", there.copy_to_host(), 3 * a)
    mapped = cuda.mapped_array(a.size, np.float32)
    mapped[:] = a
    scale[blocks(a.size), THREADS](mapped, np.float32(2))
    cuda.synchronize()
    show("mapped array", mapped, 2 * a)
    managed = cuda.managed_array(a.size, np.float32)
    managed[:] = a
    for _ in range(3):
        scale[blocks(a.size), THREADS](managed, np.float32(2))
        cuda.synchronize()
        managed += 1
    show("managed array", managed, 8 * a + 7, 1e-3)
    own = a.copy()
    with cuda.pinned(own):
        there = cuda.to_device(own)
        scale[blocks(a.size), THREADS](there, np.float32(5))
        there.copy_to_host(own)
    show("registered memory", own, 5 * a)


def main():
    """Runs all parts."""
    common.measure("version", numba.__version__, "Numba")
    if not cuda.is_available():
        print("Numba finds no CUDA here")
        return 77
    a = np.random.default_rng(1).standard_normal(1 << 14).astype(np.float32)
    kernels(a)
    memory(a)
    return 0


if __name__ == "__main__":
    sys.exit(main())
