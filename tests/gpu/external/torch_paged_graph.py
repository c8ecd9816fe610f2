"""PyTorch: attention over pages of a cache, in a CUDA graph that is replayed as the cache grows.

Servers of language models work like this: a table of pages per sequence, and one graph per batch.
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import common  # noqa: E402

torch = common.need("torch")[0]

SEQUENCES, HEADS, SIZE, PAGE, PAGES = 8, 4, 64, 16, 256
LONGEST = 12 * PAGE


def attention(query, keys, values, table, lengths):
    """Gathers the pages of each sequence, and attends to its tokens."""
    gathered = [cache[table].reshape(SEQUENCES, LONGEST, HEADS, SIZE).transpose(1, 2) for cache in (keys, values)]
    scores = torch.matmul(query.unsqueeze(2), gathered[0].transpose(2, 3)) / SIZE**0.5
    outside = torch.arange(LONGEST, device="cuda")[None, :] >= lengths[:, None]
    scores = scores.masked_fill(outside[:, None, None, :], float("-inf"))
    return torch.matmul(torch.softmax(scores, -1), gathered[1]).squeeze(2)


def main():
    """Captures one step of decoding, replays it 150 times, and compares each with an eager step."""
    common.measure("version", torch.__version__, "PyTorch")
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator().manual_seed(1)
    keys = torch.zeros(PAGES, PAGE, HEADS, SIZE, device="cuda")
    values = torch.zeros_like(keys)
    # The pages of a sequence lie anywhere in the cache.
    table = torch.randperm(PAGES, generator=generator)[: SEQUENCES * LONGEST // PAGE].reshape(SEQUENCES, -1).cuda()
    query, new_key, new_value = (torch.zeros(SEQUENCES, HEADS, SIZE, device="cuda") for _ in range(3))
    lengths = torch.arange(1, SEQUENCES + 1, device="cuda")

    def step():
        page = table.gather(1, (lengths // PAGE)[:, None]).squeeze(1)
        keys.index_put_((page, lengths % PAGE), new_key)
        values.index_put_((page, lengths % PAGE), new_value)
        lengths.add_(1)
        return attention(query, keys, values, table, lengths)

    start = lengths.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for cache in (keys, values):
        cache.zero_()
    lengths.copy_(start)
    eager = [tensor.clone() for tensor in (keys, values, lengths)]
    worst = 0.0
    for count in range(150):
        for tensor in (query, new_key, new_value):
            # Pinned memory that the program writes again right after the copy.
            tensor.copy_(torch.randn(tensor.shape, generator=generator).pin_memory(), non_blocking=True)
        graph.replay()
        page = table.gather(1, (eager[2] // PAGE)[:, None]).squeeze(1)
        eager[0][page, eager[2] % PAGE], eager[1][page, eager[2] % PAGE] = new_key, new_value
        eager[2] += 1
        want = attention(query, eager[0], eager[1], table, eager[2])
        worst = max(worst, (out - want).abs().max().item())
        if count % 50 == 49:
            common.expect(f"after {count + 1} replays", worst < 1e-4, common.digest(out), common.digest(keys))
    return 0


if __name__ == "__main__":
    sys.exit(main())
