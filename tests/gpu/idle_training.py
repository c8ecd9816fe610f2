#!/usr/bin/env python3
"""Training that prints `half` in the middle and waits for a line on stdin.

At its end it prints the losses, and a digest of every tensor of the model and of its optimizer."""

import hashlib
import sys

import torch


def main():
    """See above."""
    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    model = torch.nn.Sequential(torch.nn.Linear(2048, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 2048)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(64, 256, 2048).cuda()
    losses = []
    for step in range(40):
        if step == 20:
            torch.cuda.synchronize()
            print("half", flush=True)
            sys.stdin.readline()
        batch = data[step % len(data)]
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    digest = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]):
            digest.update(tensor.cpu().numpy().tobytes())
    print("losses", *(f"{loss.item():.9e}" for loss in losses[::10]), f"{losses[-1].item():.9e}", flush=True)
    print("tensors", digest.hexdigest(), flush=True)


if __name__ == "__main__":
    import os

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    main()
