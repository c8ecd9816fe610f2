"""A CUDA graph of 20 half-precision layers of 1024 x 1024, compared with the eager result."""

import common


def run(repeat):
    """Compares the replay bit for bit, and reports its time."""
    import torch

    torch.manual_seed(3)
    layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(20)]).half().cuda().eval()
    data = torch.randn(64, 1024).half().cuda()
    with torch.inference_mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                layers(data)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layers(data)
        for round_number in range(3):
            data.copy_(torch.randn(64, 1024).half() * (round_number + 1))
            graph.replay()
            replayed = out.clone()
            eager = layers(data)
            difference = (replayed.float() - eager.float()).abs().max().item()
            print(
                "cuda_graph", round_number, common.digest(replayed), "as eager" if difference < 1e-2 else f"OFF by {difference}"
            )

        def hundred():
            for _ in range(100):
                graph.replay()
            torch.cuda.synchronize()

        def one():
            graph.replay()
            torch.cuda.synchronize()

        common.measure("cuda_graph_replay", common.timed(hundred, repeat) * 10, "ms")
        common.measure("cuda_graph_replay_synchronised", common.timed(one, repeat * 20) * 1e3, "ms")


def bench(quick):
    """The measurement of the table."""
    run(10 if quick else 30)


if __name__ == "__main__":
    run(2)
