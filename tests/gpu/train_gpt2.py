"""Trains GPT-2 (124 M parameters, random weights) on 8 x 1024 random tokens per step, bf16, AdamW.

Prints the loss of every step as an exact hexadecimal number and as a decimal one.
"""

import argparse

import common


def train(steps, deterministic=False, batch=8, length=1024, warm_up=3):
    """Run the steps, print the losses, report the time per step."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    if deterministic:
        common.deterministic()
    torch.manual_seed(1234)
    config = GPT2Config(attn_implementation="sdpa")
    model = GPT2LMHeadModel(config).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(99)
    clock = common.Steps(warm_up)
    torch.cuda.synchronize()
    clock.tick()
    for step in range(steps):
        tokens = torch.randint(0, config.vocab_size, (batch, length), generator=generator).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        value = loss.item()
        clock.tick()
        print(f"gpt2 step {step} loss {value.hex()} {value:.6f}", flush=True)
    if deterministic:
        print(f"gpt2 weights {common.digest(model.transformer.h[5].mlp.c_fc.weight)}")
    clock.report("gpt2_train")


def bench(quick):
    """The measurement of the table."""
    train(10 if quick else 25, warm_up=5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()
    train(args.steps, args.deterministic, args.batch)
