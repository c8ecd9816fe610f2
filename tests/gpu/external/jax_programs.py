"""JAX: compilation, derivatives, loops, batches, random numbers, FFT, linear algebra."""

import os
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import common  # noqa: E402

# Other programs use the card as well; and algorithms are chosen without measurements.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0")
jax, np = common.need("jax", "numpy")
jnp, lax = jax.numpy, jax.lax


def show(name, got, want, tolerance=1e-4):
    """Compares with NumPy, and prints the checksum of the result."""
    got = np.asarray(got)
    near = np.allclose(got, want, rtol=tolerance, atol=tolerance)
    common.expect(name, near, common.digest_of_bytes(got.tobytes()))


def loops(x, a):
    """Runs scan, while_loop, fori_loop and cond, each compiled."""
    total, steps = jax.jit(lambda v: lax.scan(lambda carry, row: (carry + row, carry * 2), jnp.zeros(v.shape[1]), v))(x)
    show("scan", total, a.sum(0))
    show("scan: outputs", steps, 2 * (np.cumsum(a, 0) - a), 1e-3)
    halved = jax.jit(lambda v: lax.while_loop(lambda s: jnp.sum(s) > 1.0, lambda s: s / 2, v))(jnp.abs(x))
    want = np.abs(a)
    while want.sum() > 1.0:
        want = want / 2
    show("while_loop", halved, want)
    show("fori_loop", jax.jit(lambda v: lax.fori_loop(0, 100, lambda i, s: s + i * v, v))(x), a * 4951, 1e-3)
    chosen = jax.jit(lambda v, flag: lax.cond(flag, lambda s: s + 1, lambda s: s - 1, v))
    show("cond", chosen(x, True) - chosen(x, False), np.full_like(a, 2.0))


def derivatives(x, a):
    """Differentiates functions, also through a scan."""
    show("grad", jax.jit(jax.grad(lambda v: jnp.sum(jnp.sin(v) ** 2)))(x), np.sin(2 * a))

    def power(v):
        return lax.scan(lambda carry, _: (carry * v, None), jnp.ones_like(v), None, length=3)[0].sum()

    show("grad of scan", jax.jit(jax.grad(power))(x), 3 * a**2, 1e-3)
    hessian = jax.jit(jax.hessian(lambda v: jnp.sum(v**3)))(x[0, :8])
    show("hessian", hessian, np.diag(6 * a[0, :8]))


def arrays(x, a):
    """Runs products, batches, transforms and linear algebra."""
    show("matmul", jax.jit(lambda v: jnp.matmul(v, v.T, precision="highest"))(x), a @ a.T, 1e-3)
    show("vmap", jax.jit(jax.vmap(lambda row: jnp.dot(row, row)))(x), (a * a).sum(1), 1e-3)
    show("sort", jax.jit(jnp.sort)(x), np.sort(a))
    show("convolution", jnp.convolve(x[0], x[1, :16], precision="highest"), np.convolve(a[0], a[1, :16]), 1e-3)
    show("fft", jnp.fft.fft(x[0]), np.fft.fft(a[0]), 1e-2)
    square = a[:, : a.shape[0]]
    symmetric = square @ square.T + a.shape[0] * np.eye(a.shape[0], dtype=np.float32)
    factor = np.asarray(jnp.linalg.cholesky(symmetric))
    common.expect("cholesky", np.allclose(factor @ factor.T, symmetric, rtol=1e-3, atol=1e-2))
    solved = np.asarray(jnp.linalg.solve(symmetric, a[:, 0]))
    common.expect("solve", np.allclose(symmetric @ solved, a[:, 0], atol=1e-2))
    values = np.asarray(jnp.linalg.eigvalsh(symmetric))
    common.expect("eigvalsh", np.allclose(values, np.linalg.eigvalsh(symmetric), rtol=1e-3))
    u, s, v = map(np.asarray, jnp.linalg.svd(square))
    common.expect("svd", np.allclose(u * s @ v, square, atol=1e-2))


def training():
    """Fits a small network with a compiled step, and prints losses."""
    key = jax.random.PRNGKey(0)
    keys = jax.random.split(key, 3)
    inputs, target = jax.random.normal(keys[0], (256, 16)), jax.random.normal(keys[1], (256, 1))
    weights = [jax.random.normal(keys[2], (16, 32)) * 0.1, jnp.ones((32, 1)) * 0.1]

    def loss(w):
        return jnp.mean((jnp.tanh(inputs @ w[0]) @ w[1] - target) ** 2)

    @jax.jit
    def many(w):
        def step(w, _):
            value, slopes = jax.value_and_grad(loss)(w)
            return [one - 0.05 * slope for one, slope in zip(w, slopes)], value

        return lax.scan(step, w, None, length=200)

    _, losses = many(weights)
    common.expect("training", bool(losses[-1] < losses[0]), f"{float(losses[0]):.4f} to {float(losses[-1]):.4f}")


def main():
    """Runs all parts on a GPU."""
    common.measure("version", jax.__version__, "JAX")
    if jax.default_backend() != "gpu" and "--any-device" not in sys.argv:
        print(f"JAX has no GPU here: its backend is {jax.default_backend()}")
        return 77
    a = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    x = jnp.asarray(a)
    show("jit", jax.jit(lambda v: jnp.tanh(v) * 2 + 1)(x), np.tanh(a) * 2 + 1)
    loops(x, a)
    derivatives(x, a)
    arrays(x, a)
    drawn = np.asarray(jax.random.normal(jax.random.PRNGKey(7), (100_000,)))
    common.expect("random", abs(drawn.mean()) < 0.02 and abs(drawn.std() - 1) < 0.02, common.digest_of_bytes(drawn.tobytes()))
    big = jnp.full((2048, 2048), 0.5)
    for _ in range(10):
        big = jax.jit(lambda v: jnp.matmul(v, v) / 1024.0, donate_argnums=0)(big)
    common.expect("donated buffers", bool((big == 0.5).all()))
    training()
    return 0


if __name__ == "__main__":
    sys.exit(main())
