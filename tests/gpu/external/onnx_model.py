"""ONNX Runtime: a model made here, by the CUDA provider and by the processor."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import common  # noqa: E402

np, onnx, runtime = common.need("numpy", "onnx", "onnxruntime")
helper, numpy_helper = onnx.helper, onnx.numpy_helper


def model():
    """Returns a network of convolution, normalisation, pooling, product and softmax."""
    random = np.random.default_rng(1)
    weights = {
        "kernel": random.standard_normal((16, 3, 3, 3)) * 0.2,
        "scale": np.ones(16),
        "shift": np.zeros(16),
        "mean": random.standard_normal(16) * 0.1,
        "variance": np.abs(random.standard_normal(16)) + 0.5,
        "matrix": random.standard_normal((16, 10)),
        "offset": random.standard_normal(10),
    }
    nodes = [
        helper.make_node("Conv", ["image", "kernel"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["a", "scale", "shift", "mean", "variance"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("GlobalAveragePool", ["c"], ["d"]),
        helper.make_node("Flatten", ["d"], ["e"]),
        helper.make_node("Gemm", ["e", "matrix", "offset"], ["f"]),
        helper.make_node("Softmax", ["f"], ["classes"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, ["n", 3, 32, 32])],
        [helper.make_tensor_value_info("classes", onnx.TensorProto.FLOAT, ["n", 10])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(made)
    return made.SerializeToString()


def session(data, provider, **options):
    """Returns a session of one provider."""
    quiet = runtime.SessionOptions()
    quiet.log_severity_level = 3
    return runtime.InferenceSession(data, quiet, providers=[(provider, {key: str(value) for key, value in options.items()})])


def main():
    """Compares both providers."""
    common.measure("version", runtime.__version__, "ONNX Runtime")
    if "CUDAExecutionProvider" not in runtime.get_available_providers():
        print(f"this ONNX Runtime has no CUDA provider, but {', '.join(runtime.get_available_providers())}")
        return 77
    if hasattr(runtime, "preload_dlls"):
        # Finds the libraries of NVIDIA's wheels.
        runtime.preload_dlls()
    data = model()
    # Algorithms are chosen without measurements, and without TF32.
    options = {"cudnn_conv_algo_search": "HEURISTIC", "use_tf32": 0}
    card, host = session(data, "CUDAExecutionProvider", **options), session(data, "CPUExecutionProvider")
    common.expect("provider", card.get_providers()[0] == "CUDAExecutionProvider")
    random = np.random.default_rng(2)
    for batch in (1, 8, 64):
        image = random.standard_normal((batch, 3, 32, 32)).astype(np.float32)
        got, want = card.run(None, {"image": image})[0], host.run(None, {"image": image})[0]
        common.expect(f"batch of {batch}", np.allclose(got, want, rtol=1e-3, atol=1e-5), common.digest_of_bytes(got.tobytes()))
    bound = card.io_binding()
    bound.bind_ortvalue_input("image", runtime.OrtValue.ortvalue_from_numpy(image, "cuda", 0))
    bound.bind_output("classes", "cuda")
    for _ in range(20):
        card.run_with_iobinding(bound)
    again = bound.copy_outputs_to_cpu()[0]
    common.expect("bound to device memory", np.array_equal(again, got))
    graph = session(data, "CUDAExecutionProvider", enable_cuda_graph=1, **options)
    bound = graph.io_binding()
    values = runtime.OrtValue.ortvalue_from_numpy(image, "cuda", 0)
    result = runtime.OrtValue.ortvalue_from_numpy(np.zeros_like(got), "cuda", 0)
    bound.bind_ortvalue_input("image", values)
    bound.bind_ortvalue_output("classes", result)
    for _ in range(5):
        graph.run_with_iobinding(bound)
    common.expect("CUDA graph", np.allclose(result.numpy(), want, rtol=1e-3, atol=1e-5))
    return 0


if __name__ == "__main__":
    sys.exit(main())
