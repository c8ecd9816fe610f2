"""PyTorch's own list of operators: each on samples of its own, forwards and backwards.

`torch_operators.py PART PARTS` does each PARTS-th operator. A line for each operator and type has a
checksum of the results, unless a second run in this process has another one.
"""

import hashlib
import os
import pathlib
import signal
import sys
import warnings

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import common  # noqa: E402

torch = common.need("torch")[0]
# torch.testing._internal imports it, and the wheel of PyTorch does not bring it.
common.need("expecttest")
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

SAMPLES = 12
TYPES = [torch.float32, torch.complex64, torch.bfloat16, torch.int64, torch.bool]
LIMIT_S = 20


def tensors(value):
    """Yields the tensors inside a result or sample."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)


def digest(checksum, value):
    """Adds shape, type and bytes of a tensor to a checksum."""
    if value.layout != torch.strided:
        value = value.to_dense()
    value = value.detach().resolve_conj().resolve_neg().cpu()
    checksum.update(f"{tuple(value.shape)} {value.dtype}".encode())
    # NumPy lacks this type.
    value = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
    checksum.update(value.numpy().tobytes())


def once(operator, kind):
    """Runs an operator on samples of a type; returns a checksum, or the name of an error."""
    checksum, results = hashlib.sha256(), []
    torch.manual_seed(1)
    backward = kind.is_floating_point and operator.supports_autograd and kind in operator.supported_backward_dtypes("cuda")
    for number, sample in enumerate(operator.sample_inputs("cuda", kind, requires_grad=backward)):
        if number == SAMPLES:
            break
        torch.manual_seed(number)
        try:
            found = operator(sample.input, *sample.args, **sample.kwargs)
            outputs = list(tensors(found))
            if backward:
                inputs = [leaf for leaf in tensors([sample.input, sample.args, sample.kwargs]) if leaf.requires_grad]
                differentiable = [output for output in outputs if output.requires_grad]
                if differentiable and inputs:
                    loss = sum(torch.view_as_real(o).sum() if o.is_complex() else o.float().sum() for o in differentiable)
                    outputs += [g for g in torch.autograd.grad(loss, inputs, allow_unused=True) if g is not None]
            for output in outputs:
                digest(checksum, output)
        except TimeoutError:
            raise
        except Exception as error:
            text = str(error).splitlines()[0][:100] if str(error) else ""
            results.append(f"sample {number}: {type(error).__name__}: {text}")
    return checksum.hexdigest()[:16], results


def expire(_signal, _frame):
    """Ends an operator that takes too long."""
    raise TimeoutError


def main():
    """Prints a line for each operator and type."""
    part, parts = (int(argument) for argument in sys.argv[1:3]) if len(sys.argv) > 2 else (0, 1)
    common.measure("version", torch.__version__, "PyTorch's operators")
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    signal.signal(signal.SIGALRM, expire)
    for operator in op_db[part::parts]:
        for kind in TYPES:
            if kind not in operator.supported_dtypes("cuda"):
                continue
            name = f"{operator.formatted_name} {str(kind).removeprefix('torch.')}"
            signal.alarm(LIMIT_S)
            try:
                first, second = once(operator, kind), once(operator, kind)
                print(name, first[0] if first[0] == second[0] else "varies", *first[1], flush=True)
            except TimeoutError:
                print(f"{name}: more than {LIMIT_S} s", flush=True)
            except Exception as error:
                print(f"{name}: samples: {type(error).__name__}", flush=True)
            finally:
                signal.alarm(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
