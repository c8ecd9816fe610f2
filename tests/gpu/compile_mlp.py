"""torch.compile of a perceptron 512-2048-512: comparison with eager mode, time of a pass."""

import common


def run(repeat):
    """Compile, compare, measure."""
    import torch

    torch.manual_seed(8)
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).cuda().eval()
    data = torch.randn(256, 512).cuda()
    compiled = torch.compile(model)
    with torch.inference_mode():
        expected = model(data)
        out = compiled(data)
        difference = (out - expected).abs().max().item()
        print("compile_mlp", common.digest(out), "as eager" if difference < 1e-3 else f"OFF by {difference}")

        def hundred():
            for _ in range(100):
                compiled(data)
            torch.cuda.synchronize()

        def one():
            compiled(data)
            torch.cuda.synchronize()

        common.measure("compile_forward", common.timed(one, repeat * 20) * 1e3, "ms")
        common.measure("compile_forward_queued", common.timed(hundred, repeat) * 10, "ms")


def bench(quick):
    """The measurement of the table."""
    run(10 if quick else 30)


if __name__ == "__main__":
    run(2)
