"""CUDA tensors that processes pass to each other through queues (torch.multiprocessing).

One process makes tensors and two change them; the first one checks what comes back. A model whose
parameters are shared is trained by one process and read by another. Prints checksums.
"""

import common

COUNT = 60


def worker(inbox, outbox, factor):
    """Changes each tensor in place, then sends a result of its own."""
    import torch

    torch.cuda.init()
    while True:
        item = inbox.get()
        if item is None:
            break
        number, tensor = item
        tensor.mul_(factor)
        outbox.put((number, tensor * 2))
        # A tensor that was received may not be sent on, and lives until here.
        del tensor, item
    # The receiver of the last results still needs this process's memory.
    inbox.get()


def train(model, ready):
    """Trains a model whose parameters belong to another process."""
    import torch

    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad(set_to_none=True)
        inputs = torch.randn(32, 64, device="cuda")
        model(inputs).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    ready.set()


def main():
    """Starts the processes, sends, checks, prints."""
    import torch
    import torch.multiprocessing as processes

    torch.manual_seed(1)
    context = processes.get_context("spawn")
    outbox = context.Queue()
    inboxes = [context.Queue() for _ in range(2)]
    children = [context.Process(target=worker, args=(inbox, outbox, 3 + i)) for i, inbox in enumerate(inboxes)]
    for child in children:
        child.start()
    sent = {}
    for number in range(COUNT):
        # Of several sizes, so that small and large blocks of the allocator are shared.
        tensor = torch.randn(1000 * (1 + number % 40) ** 2 // 4, device="cuda")
        sent[number] = (tensor, tensor.clone())
        inboxes[number % 2].put((number, tensor))
    wrong, results = 0, {}
    for _ in range(COUNT):
        number, result = outbox.get()
        tensor, before = sent[number]
        factor = 3 + number % 2
        wrong += not torch.equal(tensor, before * factor)
        wrong += not torch.equal(result, before * factor * 2)
        results[number] = result.clone()
        del result
    print(f"tensor_queues: {COUNT} tensors there and back, {wrong} wrong,", common.digest(torch.cat([results[i] for i in range(COUNT)])))
    for inbox in inboxes:
        inbox.put(None)
        inbox.put("end")
    for child in children:
        child.join()
    print("exit statuses", [child.exitcode for child in children])
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).cuda()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.share_memory()
    ready = context.Event()
    trainer = context.Process(target=train, args=(model, ready))
    trainer.start()
    ready.wait()
    changed = sum(not torch.equal(old, new.detach()) for old, new in zip(before, model.parameters()))
    print(f"tensor_queues: {changed} of {len(before)} parameters trained,", common.digest(torch.cat([p.detach().flatten() for p in model.parameters()])))
    trainer.join()
    print("exit status", trainer.exitcode)


if __name__ == "__main__":
    main()
