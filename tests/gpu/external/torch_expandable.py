"""PyTorch with expandable segments: its memory is mapped piece by piece (`cuMemMap`), and grows."""

import os
import pathlib
import sys

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import common  # noqa: E402

torch = common.need("torch")[0]


def train():
    """Trains layers on batches of changing sizes, so that segments grow and are used again."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    generator = torch.Generator().manual_seed(4)
    for step in range(30):
        batch = torch.randn(64 << step % 8, 512, generator=generator).cuda()
        loss = (model(batch) - batch.roll(1, 1)).square().mean()
        optimizer.zero_grad(set_to_none=step % 5 == 0)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item().hex()}")
    print("weights", common.digest(layers[2].weight))


def copies():
    """Copies and fills across the borders of pieces, of 2 MiB and 20 MiB."""
    for count in (1 << 10, 3 << 19, 9 << 20):
        source = torch.arange(count, device="cuda", dtype=torch.int32)
        target = torch.empty_like(source)
        target.copy_(source)
        target[count // 3 : count // 2].zero_()
        target[count // 2 :].copy_(source[: count - count // 2].clone())
        host = torch.arange(count, dtype=torch.int32)
        target[1::2].copy_(host[1::2].cuda())
        print("copies", count, common.digest(target))
        del source, target
        torch.cuda.empty_cache()


if __name__ == "__main__":
    common.deterministic()
    train()
    copies()
    print("mapped", torch.cuda.memory_reserved() > 0)
