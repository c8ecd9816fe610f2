"""Greedy generation of 64 tokens with GPT-2 (124 M parameters, random weights), bf16, batch 1."""

import argparse

import common


def generate(repeat, each=False):
    """Generate several times, print the tokens of the first run, report the median time.

    With `each`, every run prints its tokens."""
    import torch
    from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(77)
    model = GPT2LMHeadModel(GPT2Config(attn_implementation="sdpa")).to(torch.bfloat16).cuda().eval()
    prompt = torch.arange(100, 116).unsqueeze(0).cuda()
    settings = GenerationConfig(max_new_tokens=64, do_sample=False, use_cache=True, pad_token_id=50256)
    mask = torch.ones_like(prompt)
    results = []

    def once():
        with torch.inference_mode():
            results.append(model.generate(prompt, attention_mask=mask, generation_config=settings)[0].tolist())
        if each:
            print("gpt2 run", len(results), common.digest_of_bytes(str(results[-1]).encode()), flush=True)

    taken = common.timed(once, repeat, warm_up=2)
    assert all(result == results[0] for result in results)
    print("gpt2 tokens", len(results[0]) - 16, *results[0][16:])
    common.measure("gpt2_generate", taken * 1e3, "ms")


def bench(quick):
    """The measurement of the table."""
    generate(4 if quick else 10)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    generate(args.repeat, args.repeat > 1)
