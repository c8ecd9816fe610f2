"""PyTorch: programs that split a model over GPUs; needs two GPUs, and uses two.

torch_parallel.py [PART...] runs some parts only; `windows` runs only if it is named.
"""

import ctypes
import os
import pathlib
import socket
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import common  # noqa: E402

# Libraries read these when they start. No part uses NVLink multicast.
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"

torch = common.need("torch")[0]
dist = torch.distributed

COUNT, STEPS, SIZE, HEADS, TOKENS = 2, 10, 128, 4, 32


def check(right, what):
    """Raises an error with a text if a result is wrong."""
    if not right:
        raise AssertionError(what)


def same(tensor, value, what):
    """Checks that each element of a tensor has exactly one value, or that of another tensor."""
    check(bool((tensor == value).all()), what)


def ramp(numbers, dtype=torch.float32):
    """Returns small whole numbers, whose sums are exact."""
    return (torch.arange(numbers, device="cuda") % 97).to(dtype)


class Block(torch.nn.Module):
    """A layer of a transformer."""

    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(SIZE) for _ in range(2))
        self.heads = torch.nn.Linear(SIZE, 3 * SIZE, bias=False)
        self.out = torch.nn.Linear(SIZE, SIZE)
        self.up, self.down = torch.nn.Linear(SIZE, 4 * SIZE), torch.nn.Linear(4 * SIZE, SIZE)

    def forward(self, batch):
        """Attends, and feeds forward."""
        split = self.heads(self.norms[0](batch)).unflatten(-1, (3, HEADS, SIZE // HEADS)).permute(2, 0, 3, 1, 4)
        scores = torch.softmax(split[0] @ split[1].transpose(-1, -2) / (SIZE // HEADS) ** 0.5, -1)
        batch = batch + self.out((scores @ split[2]).transpose(1, 2).flatten(2))
        return batch + self.down(torch.nn.functional.gelu(self.up(self.norms[1](batch))))


def trained(model, batches):
    """Yields the loss of each step of training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    for batch in batches:
        loss = (model(batch) - batch.flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


def fsdp(rank, count):
    """Trains with parameters split over the GPUs, and trains the whole model in each process."""
    from torch.distributed.fsdp import fully_shard

    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(8 * count, TOKENS, SIZE, generator=generator).cuda() for _ in range(STEPS)]
    torch.manual_seed(1)
    whole = torch.nn.Sequential(*(Block() for _ in range(3))).cuda()
    split = torch.nn.Sequential(*(Block() for _ in range(3))).cuda()
    split.load_state_dict(whole.state_dict())
    mesh = dist.device_mesh.init_device_mesh("cuda", (count,))
    for layer in split:
        fully_shard(layer, mesh=mesh)
    fully_shard(split, mesh=mesh)
    losses = []
    for loss in trained(split, [batch.chunk(count)[rank] for batch in batches]):
        dist.all_reduce(loss)
        losses.append(loss.item() / count)
    expected = [loss.item() for loss in trained(whole, batches)]
    for step, (loss, other) in enumerate(zip(losses, expected, strict=True), 1):
        check(
            abs(loss - other) <= 1e-4 * max(1.0, abs(other)), f"step {step}: loss {loss:.9g} split, {other:.9g} whole"
        )
    parameters = [parameter.full_tensor() for parameter in split.parameters()]
    digests = common.digest(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    return ["losses " + " ".join(f"{loss:.9g}" for loss in losses), f"parameters {digests}"]


class Pair(torch.nn.Module):
    """Two layers, of which tensor parallelism splits the first by columns, the second by rows."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(SIZE, 4 * SIZE), torch.nn.Linear(4 * SIZE, SIZE)

    def forward(self, batch):
        """Feeds forward."""
        return self.down(torch.nn.functional.gelu(self.up(batch)))


def tensor(rank, count):
    """Computes both directions of layers split by DTensor, and the same without a split."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(2)
    whole, split = Pair().cuda(), Pair().cuda()
    split.load_state_dict(whole.state_dict())
    mesh = dist.device_mesh.init_device_mesh("cuda", (count,))
    parallelize_module(split, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    batch = torch.randn(64, SIZE, generator=torch.Generator().manual_seed(6)).cuda()
    results = []
    for model in (whole, split):
        given = batch.clone().requires_grad_()
        out = model(given)
        out.square().mean().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        grads = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
        results.append([each.detach().clone() for each in (out, given.grad, *grads)])
    for name, one, other in zip(("out", "input's gradient", *dict(whole.named_parameters())), *results, strict=True):
        check(torch.allclose(one, other, rtol=1e-4, atol=1e-6), f"{name} differs from the whole model's")
    return ["results " + " ".join(common.digest(result) for result in results[1])]


def pipeline(rank, count):
    """Passes tensors between ranks, one by one and in batches, and trains in two stages."""
    after, before = (rank + 1) % count, (rank - 1) % count
    for numbers in (1, 1000, 1 << 20, 5 << 20):
        sent, got = ramp(numbers) + rank, torch.empty(numbers, device="cuda")
        if rank == 0:
            dist.send(sent, after)
            dist.recv(got, before)
        else:
            dist.recv(got, before)
            dist.send(sent, after)
        same(got, ramp(numbers) + before, f"send and recv of {numbers}")
        got.zero_()
        both = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        same(got, ramp(numbers) + before, f"batch_isend_irecv of {numbers}")
    # The first rank doubles, the last one squares; gradients come back.
    weight = torch.full((1,), 2.0, device="cuda", requires_grad=True)
    for micro in range(8):
        batch = ramp(4096) + micro
        if rank == 0:
            out = batch * weight
            dist.send(out.detach(), count - 1)
            grad = torch.empty_like(batch)
            dist.recv(grad, count - 1)
            same(grad, 4 * batch, f"gradient of micro batch {micro}")
            (out * grad / 4096).sum().backward()
        elif rank == count - 1:
            got = torch.empty_like(batch)
            dist.recv(got, 0)
            got.requires_grad_()
            got.square().sum().backward()
            dist.send(got.grad, 0)
    grads = torch.zeros(1, device="cuda") if weight.grad is None else weight.grad
    dist.broadcast(grads, 0)
    return [f"pipeline right, gradient {grads.item():.9g}"]


def collectives(rank, count):
    """Runs collectives with known results in several types."""
    ranks = sum(range(count))
    for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.float16):
        part = 12345
        whole = torch.cat([ramp(part, dtype) + other for other in range(count)])
        out = torch.empty(part, device="cuda", dtype=dtype)
        dist.reduce_scatter_tensor(out, ramp(part * count, dtype) % 31 + rank)
        expected = (count * (ramp(part * count) % 31) + ranks).chunk(count)[rank].to(dtype)
        same(out, expected, f"reduce_scatter_tensor of {dtype}")
        gathered = torch.empty(part * count, device="cuda", dtype=dtype)
        dist.all_gather_into_tensor(gathered, ramp(part, dtype) + rank)
        same(gathered, whole, f"all_gather_into_tensor of {dtype}")
        sent = torch.cat([ramp(part, dtype) + 10 * rank + other for other in range(count)])
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        expected = torch.cat([ramp(part, dtype) + 10 * other + rank for other in range(count)])
        same(got, expected, f"all_to_all_single of {dtype}")
        value = ramp(part, dtype) + rank
        dist.broadcast(value, count - 1)
        same(value, ramp(part, dtype) + count - 1, f"broadcast of {dtype}")
        parts = [torch.empty(part, device="cuda", dtype=dtype) for _ in range(count)] if rank == 0 else None
        dist.gather(ramp(part, dtype) + rank, parts, 0)
        if rank == 0:
            same(torch.cat(parts), whole, f"gather of {dtype}")
        dist.scatter(out, [piece.contiguous() for piece in whole.chunk(count)] if rank == 0 else None, 0)
        same(out, ramp(part, dtype) + rank, f"scatter of {dtype}")
        value = ramp(part, dtype) + rank
        dist.reduce(value, 0)
        if rank == 0:
            same(value, (count * ramp(part) + ranks).to(dtype), f"reduce of {dtype}")
        for operation, expected in ((dist.ReduceOp.MAX, count - 1), (dist.ReduceOp.MIN, 0)):
            value = ramp(part, dtype) + rank
            dist.all_reduce(value, operation)
            same(value, ramp(part, dtype) + expected, f"all_reduce of {dtype} by {operation}")
    # Parts of unequal lengths: rank r sends r + 1 numbers to rank 0, twice as many to rank 1.
    sizes = [(rank + 1) * (other + 1) for other in range(count)]
    got_sizes = [(other + 1) * (rank + 1) for other in range(count)]
    got = torch.empty(sum(got_sizes), device="cuda")
    dist.all_to_all_single(got, torch.full((sum(sizes),), float(rank), device="cuda"), got_sizes, sizes)
    expected = [float(other) for other, size in enumerate(got_sizes) for _ in range(size)]
    same(got, torch.tensor(expected, device="cuda"), "all_to_all_single of unequal parts")
    dist.barrier()
    return ["collectives right"]


def groups(rank, count):
    """Alternates between two communicators in two streams."""
    found = [dist.new_group(list(range(count))) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in found]
    values = [torch.full((1 << 18,), float(rank + number), device="cuda") for number in range(2)]
    expected = [[float(other + number) for other in range(count)] for number in range(2)]
    torch.cuda.synchronize()
    for turn in range(50):
        for number, group in enumerate(found):
            with torch.cuda.stream(streams[number]):
                dist.all_reduce(values[number], group=group)
                values[number].remainder_(97).add_(rank + turn)
            total = sum(expected[number]) % 97
            expected[number] = [total + other + turn for other in range(count)]
    torch.cuda.synchronize()
    for number in range(2):
        same(values[number], expected[number][rank], f"sums of group {number}")
    dist.barrier()
    for group in found:
        dist.destroy_process_group(group)
    return [f"two groups right: {expected[0][0]:g} {expected[1][0]:g}"]


def initialise(rank, count, port):
    """Joins the ranks at a port."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count))
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))


def free_port():
    """Returns a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def next_port(rank):
    """Returns the port of the next group, which rank 0 chooses."""
    port = torch.tensor([free_port() if rank == 0 else 0], device="cuda")
    dist.broadcast(port, 0)
    return port.item()


def summed(rank, count, what):
    """Checks a sum of all ranks."""
    value = ramp(1 << 20) + rank
    dist.all_reduce(value)
    same(value, count * ramp(1 << 20) + sum(range(count)), f"sum {what}")


def again(rank, count):
    """Ends the communicator and starts another one, three times."""
    for turn in range(3):
        port = next_port(rank)
        summed(rank, count, f"before end {turn}")
        dist.barrier()
        torch.cuda.synchronize()
        dist.destroy_process_group()
        initialise(rank, count, port)
        summed(rank, count, f"after end {turn}")
    return ["started again: right"]


def abort(rank, count):
    """Aborts the communicator, which has no work left, and starts another one."""
    port = next_port(rank)
    summed(rank, count, "before the abort")
    dist.barrier()
    torch.cuda.synchronize()
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    if hasattr(dist.distributed_c10d, "_abort_process_group"):
        dist.distributed_c10d._abort_process_group()
        how = "_abort_process_group"
    elif hasattr(backend, "abort"):
        backend.abort()
        dist.destroy_process_group()
        how = "abort of the backend"
    else:
        dist.destroy_process_group()
        how = "none"
    initialise(rank, count, port)
    summed(rank, count, "after the abort")
    return [f"abort ({how}): right"]


class NcclMemory:
    """An allocator of NCCL's memory, for a backend that offers none where multicast is missing."""

    def __init__(self):
        # PyTorch has loaded the library, so its name is enough.
        nccl = ctypes.CDLL("libnccl.so.2")
        nccl.ncclMemAlloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
        nccl.ncclMemFree.argtypes = [ctypes.c_void_p]

        def take(size, _device, _stream):
            memory = ctypes.c_void_p()
            return memory.value if nccl.ncclMemAlloc(ctypes.byref(memory), size) == 0 else None

        def give(memory, _size, _device, _stream):
            nccl.ncclMemFree(memory)

        arguments = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.take = ctypes.CFUNCTYPE(ctypes.c_void_p, *arguments)(take)
        self.give = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *arguments)(give)
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (self.take, self.give)]
        self.allocator = torch._C._cuda_customAllocator(*addresses)


# PyTorch calls the functions of an allocator until the process ends.
KEPT = []


def pool_of(rank, backend):
    """Returns a pool of NCCL's memory."""
    try:
        allocator, source = backend.mem_allocator, "backend.mem_allocator"
    except (NotImplementedError, RuntimeError):
        KEPT.append(NcclMemory())
        allocator, source = KEPT[-1].allocator, "ncclMemAlloc"
    if rank == 0:
        # A backend offers its allocator only where the card has multicast.
        common.measure("allocator", 1, source)
    return torch.cuda.MemPool(allocator)


def sums_of_pool(rank, count, register):
    """All-reduces tensors of a pool that NCCL knows, eagerly and in a graph."""
    backend = dist.group.WORLD._get_backend(torch.device("cuda", rank))
    if not all(hasattr(backend, name) for name in ("register_mem_pool", "deregister_mem_pool")):
        return ["no register_mem_pool"]
    pool = pool_of(rank, backend)
    numbers = 4 << 20
    with torch.cuda.use_mem_pool(pool):
        value, out = torch.empty(numbers, device="cuda"), torch.empty(numbers // count, device="cuda")
    start = ramp(numbers) + rank
    expected = count * ramp(numbers) + sum(range(count))
    register(backend, pool)
    for turn in range(5):
        value.copy_(start)
        dist.all_reduce(value)
        same(value, expected, f"sum {turn} in a registered pool")
        value.copy_(start)
        dist.reduce_scatter_tensor(out, value)
        same(out, expected.chunk(count)[rank], f"reduce_scatter {turn} in a registered pool")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value.copy_(start)
        dist.all_reduce(value)
        value.add_(1)
        dist.all_reduce(value)
    for turn in range(20):
        value.zero_()
        graph.replay()
        same(value, count * (expected + 1), f"sum {turn} of a graph in a registered pool")
    torch.cuda.synchronize()
    dist.barrier()
    # The graph keeps what NCCL has registered for it.
    del graph
    torch.cuda.synchronize()
    backend.deregister_mem_pool(pool)
    del value, out, pool
    return ["registered pool right"]


def buffers(rank, count):
    """Registers a pool's memory by ncclCommRegister."""
    return sums_of_pool(rank, count, lambda backend, pool: backend.register_mem_pool(pool))


def windows(rank, count):
    """Registers a pool's memory as symmetric windows, by ncclCommWindowRegister."""
    return sums_of_pool(rank, count, lambda backend, pool: backend.register_mem_pool(pool, True))


def symmetric(rank, count):
    """Reads, writes and sums memory of other GPUs by PyTorch's symmetric memory."""
    import torch.distributed._symmetric_memory as symmetric_memory

    group, device, numbers = dist.group.WORLD, torch.device("cuda", rank), 1 << 18
    peer, limit = (rank + 1) % count, 20000
    value = symmetric_memory.empty(numbers, dtype=torch.float32, device=device)
    handle = symmetric_memory.rendezvous(value, group)
    check((handle.rank, handle.world_size) == (rank, count), "rank of the handle")
    value.copy_(ramp(numbers) + rank)
    handle.barrier(channel=0, timeout_ms=limit)
    same(handle.get_buffer(peer, (numbers,), torch.float32).clone(), ramp(numbers) + peer, "a read of the other GPU")
    handle.barrier(channel=0, timeout_ms=limit)
    handle.get_buffer(peer, (numbers,), torch.float32).copy_(ramp(numbers) + 100 * rank)
    handle.barrier(channel=0, timeout_ms=limit)
    same(value, ramp(numbers) + 100 * ((rank - 1) % count), "a write of the other GPU")
    for turn in range(20):
        handle.put_signal(peer, channel=1, timeout_ms=limit)
        handle.wait_signal((rank - 1) % count, channel=1, timeout_ms=limit)
        handle.barrier(channel=0, timeout_ms=limit)
        value.copy_(ramp(numbers) + rank + turn)
        out = torch.ops.symm_mem.one_shot_all_reduce(value, "sum", group.group_name)
        expected = count * (ramp(numbers) + turn) + sum(range(count))
        same(out, expected, f"one_shot_all_reduce {turn}")
        torch.ops.symm_mem.two_shot_all_reduce_(value, "sum", group.group_name)
        same(value, expected, f"two_shot_all_reduce_ {turn}")
    handle.barrier(channel=0, timeout_ms=limit)
    start = ramp(numbers) + rank
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value.copy_(start)
        torch.ops.symm_mem.two_shot_all_reduce_(value, "sum", group.group_name)
        value.add_(rank)
        out = torch.ops.symm_mem.one_shot_all_reduce(value, "sum", group.group_name)
    ranks = sum(range(count))
    for turn in range(50):
        graph.replay()
        same(out, count * (count * ramp(numbers) + ranks) + ranks, f"replay {turn} of symmetric sums")
    torch.cuda.synchronize()
    dist.barrier()
    return ["symmetric memory right"]


PARTS = {
    part.__name__: part
    for part in (fsdp, tensor, pipeline, collectives, groups, buffers, symmetric, again, abort, windows)
}
ONLY_NAMED = ("windows",)


def work(rank, count, port, names):
    """One rank."""
    common.deterministic()
    torch.cuda.set_device(rank)
    initialise(rank, count, port)
    for name in names:
        try:
            lines = PARTS[name](rank, count)
        except Exception as error:  # noqa: BLE001
            said = str(error).splitlines() or [""]
            print(f"rank {rank}: {name}: {type(error).__name__}: {said[0]}", flush=True)
            # The other rank may wait for this one, so no part can follow, and no library's end.
            os._exit(1)
        if rank == 0:
            print(*(f"{name}: {line}" for line in lines), sep="\n", flush=True)
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()


def main():
    """Starts the ranks."""
    names = sys.argv[1:] or [name for name in PARTS if name not in ONLY_NAMED]
    if unknown := [name for name in names if name not in PARTS]:
        sys.exit(f"unknown part {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    if torch.cuda.device_count() < COUNT:
        common.skip("needs two GPUs")
    try:
        torch.multiprocessing.spawn(work, args=(COUNT, free_port(), names), nprocs=COUNT)
    except torch.multiprocessing.ProcessExitedException as error:
        print(f"a rank failed: exit code {error.exit_code}")
        sys.exit(1)
    print(f"{COUNT} ranks right")


if __name__ == "__main__":
    main()
