"""PyTorch: one process for each GPU, NCCL between them, DistributedDataParallel; needs two GPUs."""

import os
import pathlib
import socket
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import common  # noqa: E402

torch = common.need("torch")[0]

STEPS = 20


def sums(rank, count, sizes=(2, 1000, 1 << 20, 1 << 24)):
    """All-reduces tensors of these sizes, also within a graph; returns what was wrong."""
    wrong = []
    for numbers in sizes:
        tensor = torch.arange(numbers, device="cuda", dtype=torch.float32) % 97 + rank
        torch.distributed.all_reduce(tensor)
        expected = count * (torch.arange(numbers, device="cuda", dtype=torch.float32) % 97) + sum(range(count))
        if not torch.equal(tensor, expected):
            wrong.append(f"all_reduce of {numbers}")
    parts = [torch.empty(1000, device="cuda") for _ in range(count)]
    torch.distributed.all_gather(parts, torch.full((1000,), float(rank), device="cuda"))
    if any((part != other).any() for other, part in enumerate(parts)):
        wrong.append("all_gather")
    tensor = torch.ones(4096, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.distributed.all_reduce(tensor)
    for _ in range(5):
        graph.replay()
    if (tensor != float(count**5)).any():
        wrong.append("all_reduce in a graph")
    return wrong


def losses(rank):
    """Trains a small model by DistributedDataParallel."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(10 + rank)
    for _ in range(STEPS):
        batch = torch.randn(64, 256, generator=generator).cuda()
        loss = (model(batch) - batch.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.distributed.all_reduce(loss)
        yield loss.item()


def work(rank, count, port):
    """One rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count))
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    wrong = sums(rank, count)
    trained = list(losses(rank))
    torch.distributed.destroy_process_group()
    if rank == 0:
        print("losses", *(f"{loss:.9g}" for loss in trained))
    if wrong:
        print(f"rank {rank}: wrong: {', '.join(wrong)}")
        sys.exit(1)


def start(rank_of, *arguments):
    """Runs `rank_of(rank, count, port, *arguments)` in a process for each GPU."""
    count = torch.cuda.device_count()
    if count < 2:
        common.skip("needs two GPUs")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(rank_of, args=(count, port, *arguments), nprocs=count)
    print(f"{count} ranks right")


if __name__ == "__main__":
    start(work)
