"""A process for each GPU, as torchrun starts them: ranks.py [--quick] PART...

    torchrun --standalone --nproc-per-node 2 ranks.py gpt2

The first rank prints. Bus bandwidth is that of NCCL's tests: bytes moved by each GPU in a time.
"""

import argparse
import os
import signal
import time

import common

# Bytes of the all-reduces, and those that also run in a graph.
SIZES = [8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30]
IN_A_GRAPH = [8, 64 << 10, 16 << 20]
# All-reduces in a graph.
CAPTURED = 20
# Seconds of small all-reduces before the first measured one: pinned memory rests after 2 s.
WARM_UP = 5


def say(*words):
    """Prints a result of the first rank."""
    if os.environ["RANK"] == "0":
        print(*words, flush=True)


def report(name, seconds, size):
    """Prints time and bus bandwidth of an all-reduce."""
    import torch.distributed as dist

    count = dist.get_world_size()
    if os.environ["RANK"] != "0":
        return
    if size <= 1 << 20:
        common.measure(f"{name}_{size}B", seconds * 1e6, "us")
    else:
        common.measure(f"{name}_{size >> 20}MiB_bus", 2 * (count - 1) / count * size / seconds / 1e9, "GB/s")


def allreduce(quick):
    """Sums of all sizes, one after the other and in a graph."""
    import torch
    import torch.distributed as dist

    def seconds(function, repeat):
        for _ in range(5):
            function()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeat):
            function()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / repeat

    first = torch.ones(2, device="cuda")
    begin = time.perf_counter()
    report("allreduce_at_start", seconds(lambda: dist.all_reduce(first), 100), first.nbytes)
    # All ranks have to make the same calls, so one of them tells the time.
    more = torch.ones(1, device="cuda")
    while more.item():
        for _ in range(50):
            dist.all_reduce(first)
        more.fill_(time.perf_counter() - begin < WARM_UP)
        dist.broadcast(more, 0)
    for size in SIZES:
        tensor = torch.ones(size // 4, device="cuda", dtype=torch.float32) * (dist.get_rank() + 1)
        dist.all_reduce(tensor)
        right = bool((tensor == sum(range(dist.get_world_size() + 1))).all())
        say("allreduce", size, "right" if right else "WRONG")
        # So many that the synchronization at the end hardly counts.
        repeat = (20 if size > 16 << 20 else 300) // (2 if quick else 1)
        report("allreduce", seconds(lambda tensor=tensor: dist.all_reduce(tensor), repeat), size)
        if size in IN_A_GRAPH:
            tensor.fill_(0)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(CAPTURED):
                    dist.all_reduce(tensor)
            report("allreduce_graph", seconds(graph.replay, 10) / CAPTURED, size)
            del graph
        del tensor


def launch_time(name):
    """Measures launches of a small kernel, which wait for nothing."""
    import torch

    tensor = torch.zeros(1, device="cuda")

    def launches():
        for _ in range(20000):
            tensor.add_(1)
        torch.cuda.synchronize()

    seconds = common.timed(launches, 5, warm_up=1)
    if os.environ["RANK"] == "0":
        common.measure(name, seconds / 20000 * 1e6, "us")


def launches(_):
    """Launches in a process that has a communicator; `main` measures them without one."""
    import torch
    import torch.distributed as dist

    tensor = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    launch_time("launch_beside_nccl")
    while time.perf_counter() - begin < WARM_UP:
        tensor.add_(1)
    torch.cuda.synchronize()
    launch_time("launch_beside_resting_nccl")


def decode(quick):
    """Decodes with layers that the GPUs share (tensor parallelism): a sum in each layer."""
    import torch
    import torch.distributed as dist

    width, layers, tokens = 2048, 8, 32 if quick else 64
    rank, count = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(5)
    weights = []
    for _ in range(layers):
        up = torch.randn(width, 4 * width, generator=generator) / width**0.5
        down = torch.randn(4 * width, width, generator=generator) / (4 * width) ** 0.5
        weights.append((up.chunk(count, 1)[rank].cuda().bfloat16(), down.chunk(count, 0)[rank].cuda().bfloat16()))
    state = torch.ones(1, width, device="cuda", dtype=torch.bfloat16)

    def token():
        current = state
        for up, down in weights:
            part = torch.nn.functional.gelu(current @ up) @ down
            dist.all_reduce(part)
            current = torch.nn.functional.layer_norm(current + part, (width,))
        state.copy_(current)

    for _ in range(3):
        token()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token()
    for how, step in (("eager", token), ("graph", graph.replay)):
        state.fill_(1)
        taken = common.timed(lambda step=step: ([step() for _ in range(tokens)], torch.cuda.synchronize()), 5, warm_up=1)
        say("decode", how, common.digest(state))
        if rank == 0:
            common.measure(f"tensor_parallel_decode_{how}_token", taken / tokens * 1e6, "us")


def gpt2(quick):
    """Trains GPT-2 with DistributedDataParallel."""
    import torch
    import torch.distributed as dist
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1234)
    rank = dist.get_rank()
    config = GPT2Config(attn_implementation="sdpa")
    model = torch.nn.parallel.DistributedDataParallel(GPT2LMHeadModel(config).cuda().train(), device_ids=[torch.cuda.current_device()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(99 + rank)
    clock = common.Steps(5)
    torch.cuda.synchronize()
    clock.tick()
    for step in range(12 if quick else 25):
        tokens = torch.randint(0, config.vocab_size, (8, 1024), generator=generator).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        value = shown.item()
        clock.tick()
        say(f"ranks step {step} loss {value.hex()} {value:.6f}")
    if rank == 0:
        clock.report("gpt2_ddp_train")


def killed(_):
    """The last rank is killed between two sums; the others end as torchrun lets them."""
    import torch
    import torch.distributed as dist

    tensor = torch.ones(1 << 20, device="cuda")
    for number in range(10):
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        say("sum", number)
        if number == 4 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("parts", nargs="+", choices=["launches", "allreduce", "decode", "gpt2", "killed"])
    args = parser.parse_args()
    import torch
    import torch.distributed as dist

    rank = int(os.environ["LOCAL_RANK"])
    common.deterministic()
    torch.cuda.set_device(rank)
    if "launches" in args.parts:
        launch_time("launch_alone")
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    for part in args.parts:
        {"launches": launches, "allreduce": allreduce, "decode": decode, "gpt2": gpt2, "killed": killed}[part](args.quick)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
