"""Trains ResNet-50 (random weights) on random images: batches of 128, channels_last, bf16, SGD.

The input of every step is copied from pinned host memory: in the step itself, or with --prefetch on
a stream of its own during the previous step. Prints the loss of every step as an exact hexadecimal
number and as a decimal one.
"""

import argparse

import common


def build(deterministic):
    """Returns the network, defined here so that only PyTorch is needed."""
    import torch
    from torch import nn

    def convolution(inside, outside, size, stride=1):
        return nn.Conv2d(inside, outside, size, stride, size // 2, bias=False)

    class Bottleneck(nn.Module):
        """Three convolutions and a shortcut."""

        def __init__(self, inside, middle, stride):
            super().__init__()
            outside = middle * 4
            self.body = nn.Sequential(
                convolution(inside, middle, 1),
                nn.BatchNorm2d(middle),
                nn.ReLU(inplace=True),
                convolution(middle, middle, 3, stride),
                nn.BatchNorm2d(middle),
                nn.ReLU(inplace=True),
                convolution(middle, outside, 1),
                nn.BatchNorm2d(outside),
            )
            self.shortcut = nn.Identity()
            if stride != 1 or inside != outside:
                self.shortcut = nn.Sequential(convolution(inside, outside, 1, stride), nn.BatchNorm2d(outside))

        def forward(self, x):
            """Body plus shortcut."""
            return torch.relu(self.body(x) + self.shortcut(x))

    class EverySecond(nn.Module):
        """Replaces max pooling, whose backward pass is not deterministic."""

        def forward(self, x):
            """Drop every second row and column."""
            return x[:, :, ::2, ::2]

    class Mean(nn.Module):
        """Average over the image."""

        def forward(self, x):
            """One number per channel."""
            return x.mean((2, 3))

    layers = [convolution(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(EverySecond() if deterministic else nn.MaxPool2d(3, 2, 1))
    inside = 64
    for middle, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inside, middle, stride if block == 0 else 1))
            inside = middle * 4
    return nn.Sequential(*layers, Mean(), nn.Linear(inside, 1000))


def train(steps, deterministic=False, prefetch=False, batch=128, warm_up=3, fastest=False):
    """Run the steps, print the losses, report the time per step."""
    import torch

    if deterministic:
        common.deterministic()
    # Choosing algorithms by their speed differs from run to run, and so do the last bits: only for
    # measurements.
    torch.backends.cudnn.benchmark = fastest
    torch.manual_seed(4321)
    model = build(deterministic).cuda().to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    generator = torch.Generator().manual_seed(7)
    inputs = []
    for _ in range(2):
        images = torch.randn(batch, 3, 224, 224, generator=generator).to(memory_format=torch.channels_last).pin_memory()
        inputs.append((images, torch.randint(0, 1000, (batch,), generator=generator).pin_memory()))
    side = torch.cuda.Stream() if prefetch else None

    def to_device(step):
        images, labels = inputs[step % 2]
        return images.cuda(non_blocking=True), labels.cuda(non_blocking=True)

    def fetch(step):
        if side is None:
            return to_device(step)
        with torch.cuda.stream(side):
            return to_device(step)

    upcoming = fetch(0) if prefetch else None
    clock = common.Steps(warm_up)
    torch.cuda.synchronize()
    clock.tick()
    for step in range(steps):
        if prefetch:
            torch.cuda.current_stream().wait_stream(side)
            images, labels = upcoming
            images.record_stream(torch.cuda.current_stream())
            labels.record_stream(torch.cuda.current_stream())
            upcoming = fetch(step + 1)
        else:
            images, labels = fetch(step)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        value = loss.item()
        clock.tick()
        print(f"resnet50 step {step} loss {value.hex()} {value:.6f}", flush=True)
    if deterministic:
        print(f"resnet50 weights {common.digest(model[0].weight)}")
    clock.report("resnet50_prefetch" if prefetch else "resnet50_train")
    common.measure("resnet50_input_bytes", inputs[0][0].numel() * 4, "B")


def bench(quick):
    """The measurements of the table."""
    train(12 if quick else 30, warm_up=6, fastest=True)
    train(12 if quick else 30, prefetch=True, warm_up=6, fastest=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--prefetch", action="store_true")
    args = parser.parse_args()
    train(args.steps, args.deterministic, args.prefetch, args.batch)
