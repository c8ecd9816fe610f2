"""PyTorch: NCCL without peer access, by shared host memory or by sockets as between hosts.

    torch_transports.py shared-memory|network

One process for each GPU; needs two GPUs. NCCL's threads and its kernels then watch host memory
that the others write. Under NCCL's protocol LL each word has a flag, so that no order of words
counts.
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
# Under LL alone no order of words counts. NCCL's protocol for sends has variables of its own.
ONLY_LL = {"NCCL_PROTO": "LL", "NCCL_ALLOC_P2P_NET_LL_BUFFERS": "1", "NCCL_P2P_LL_THRESHOLD": str(1 << 40)}
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


def sparse_exchanges(rank, count, kind):
    """Sends and all-to-alls of tensors in which few numbers change; returns errors."""
    wrong = []
    for numbers in (600, 60_000, 600_000):
        places = torch.arange(0, numbers, 79, device="cuda")
        for round_number in range(ROUNDS // 3):
            sent = torch.zeros(numbers, device="cuda", dtype=kind)
            sent[places] = round_number * (rank + 1)
            received = torch.full_like(sent, -1)
            before, behind = (rank - 1) % count, (rank + 1) % count
            operations = [
                torch.distributed.P2POp(torch.distributed.isend, sent, behind),
                torch.distributed.P2POp(torch.distributed.irecv, received, before),
            ]
            for request in torch.distributed.batch_isend_irecv(operations):
                request.wait()
            expected = torch.zeros_like(sent)
            expected[places] = round_number * (before + 1)
            if not torch.equal(received, expected):
                wrong.append(f"{kind} from a neighbour, {numbers}, round {round_number}")
            parts = torch.full_like(sent, -1)
            torch.distributed.all_to_all_single(parts, sent)
            part = numbers // count
            mine = slice(rank * part, (rank + 1) * part)
            ones = torch.zeros_like(sent)
            ones[places] = 1
            expected = torch.cat([ones[mine] * round_number * (other + 1) for other in range(count)])
            if not torch.equal(parts, expected):
                wrong.append(f"{kind} from all to all, {numbers}, round {round_number}")
    return wrong


def work(rank, count, port, transport):
    """One rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count))
    os.environ.update(VARIABLES[transport], **ONLY_LL)
    if transport == "network":
        os.environ["NCCL_HOSTID"] = f"host-{rank}"
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    wrong = sums(rank, count, (2, 1000, 1 << 16, 1 << 19))
    for kind in (torch.float32, torch.int32, torch.int64, torch.bfloat16):
        wrong += sparse_sums(rank, count, kind)
    for kind in (torch.int32, torch.int64):
        wrong += sparse_exchanges(rank, count, kind)
    trained = list(losses(rank))
    torch.distributed.destroy_process_group()
    if rank == 0:
        print("losses", *(f"{loss:.9g}" for loss in trained))
    if wrong:
        print(f"rank {rank}: wrong: {', '.join(wrong[:20])}")
        sys.exit(1)


if __name__ == "__main__":
    start(work, sys.argv[1])
