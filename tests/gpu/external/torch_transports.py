"""PyTorch: NCCL without peer access, by shared host memory or by sockets as between hosts.

    torch_transports.py shared-memory|network

One process for each GPU; needs two GPUs. NCCL's threads and its kernels then watch host memory
that the others write. Under NCCL_PROTO=LL each word has a flag, so that no order of words counts.
"""

import os
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import common  # noqa: E402
from torch_ranks import losses, start, sums  # noqa: E402

torch = common.need("torch")[0]

VARIABLES = {
    "shared-memory": {"NCCL_P2P_DISABLE": "1"},
    "network": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"},
}
ROUNDS = 15


def sparse_sums(rank, count, kind):
    """All-reduces of tensors in which few numbers change from one to the next; returns errors."""
    wrong = []
    numbers = 60_000
    places = torch.arange(0, numbers, 7919, device="cuda")
    for round_number in range(ROUNDS):
        tensor = torch.zeros(numbers, device="cuda", dtype=kind)
        tensor[places] = round_number * (rank + 1)
        torch.distributed.all_reduce(tensor)
        expected = torch.zeros_like(tensor)
        expected[places] = round_number * count * (count + 1) // 2
        if not torch.equal(tensor, expected):
            wrong.append(f"{kind}, round {round_number}")
    return wrong


def work(rank, count, port, transport):
    """One rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count))
    os.environ.update(VARIABLES[transport], NCCL_PROTO="LL")
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    wrong = sums(rank, count, (2, 1000, 1 << 16, 1 << 19))
    for kind in (torch.float32, torch.int32, torch.int64, torch.bfloat16):
        wrong += sparse_sums(rank, count, kind)
    trained = list(losses(rank))
    torch.distributed.destroy_process_group()
    if rank == 0:
        print("losses", *(f"{loss:.9g}" for loss in trained))
    if wrong:
        print(f"rank {rank}: wrong: {', '.join(wrong[:20])}")
        sys.exit(1)


if __name__ == "__main__":
    start(work, sys.argv[1])
