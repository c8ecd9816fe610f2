#!/usr/bin/env python3
"""Two GPUs in one process: copies between them, events across them, training on both.

    two_gpus.py copies    peer access, copies, and waiting for events of the other device
    two_gpus.py nccl      NCCL in one process: collectives, and a step of DataParallel
"""

import sys

from common import deterministic, digest


def copies():
    """See above."""
    import torch

    print("devices", torch.cuda.device_count())
    print("peer access", [[torch.cuda.can_device_access_peer(a, b) for b in range(2) if a != b] for a in range(2)])
    torch.manual_seed(3)
    for elements in (1, 1000, 1 << 20, 50_000_000):
        first = torch.randn(elements, device="cuda:0")
        second = first.to("cuda:1")
        back = (second * 2).to("cuda:0")
        print("copy", elements, digest(first), digest(second), bool((back == first * 2).all()))
    rows = torch.randn(512, 512, device="cuda:0")
    print("strided", digest(rows[:, ::2].to("cuda:1")), digest(rows.t().to("cuda:1")))
    # A long piece of work on one device: the other device's stream waits for its event, the program
    # does not.
    square = torch.randn(2048, 2048, device="cuda:0")
    event = torch.cuda.Event()
    for _ in range(50):
        square = square @ square
        square /= square.norm()
    event.record(torch.cuda.current_stream(0))
    with torch.cuda.device(1):
        stream = torch.cuda.Stream()
        stream.wait_event(event)
        with torch.cuda.stream(stream):
            there = square.to("cuda:1", non_blocking=True)
        stream.synchronize()
    print("event", bool((there.cpu() == square.cpu()).all()))
    layers = [torch.nn.Linear(256, 256).to(f"cuda:{i}") for i in range(2)]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    for step in range(5):
        x = torch.randn(64, 256, device="cuda:0")
        loss = (layers[1](layers[0](x).relu().to("cuda:1")) - x.to("cuda:1")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"pipeline step {step} loss {loss.item().hex()}")


def nccl():
    """See above."""
    import torch
    from torch.cuda import nccl as collectives

    torch.manual_seed(4)
    tensors = [torch.randn(1 << 20, device=f"cuda:{i}") for i in range(2)]
    total = tensors[0].cpu() + tensors[1].cpu()
    collectives.all_reduce(tensors)
    print("all_reduce", [bool((t.cpu() == total).all()) for t in tensors])
    collectives.broadcast(tensors)
    print("broadcast", digest(tensors[0]) == digest(tensors[1]))
    model = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 128)).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(64, 128, device="cuda:0")
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"parallel step {step} loss {loss.item().hex()}")


if __name__ == "__main__":
    deterministic()
    {"copies": copies, "nccl": nccl}[sys.argv[1]]()
