"""Training inside `att.join()`, with as many batches as a rank has, and the run that it stands for."""

import torch
from training import loss, net, sgd

BATCHES = [5, 2, 0]  # by rank
LONGEST = max(BATCHES)
GRADIENTS = {
    "bytegrad": lambda bk: [bk.algorithms.bytegrad(error_feedback=True)],
    "qadam": lambda bk: [bk.algorithms.qadam(warmup_steps=2, error_feedback=True)],
    "power_sgd": lambda bk: [bk.algorithms.power_sgd(warmup_steps=1)],
    "top_k": lambda bk: [bk.algorithms.top_k(0.3)],
}
WEIGHTS = {
    "awc": lambda bk: [bk.algorithms.decentralized()],
    "awc, every=2": lambda bk: [bk.algorithms.decentralized(every=2)],
    "atc": lambda bk: [bk.algorithms.decentralized(bk.topology.Ring(), order="atc")],
    "dcd": lambda bk: [bk.algorithms.low_precision_decentralized()],
    "choco": lambda bk: [bk.algorithms.choco(bk.topology.OnePeerExact())],
    "push_sum": lambda bk: [bk.algorithms.push_sum(bk.topology.Exponential())],
    "local_sgd": lambda bk: [bk.algorithms.local_sgd(every=2)],
    "diloco": lambda bk: [bk.algorithms.diloco(every=2)],
    "diloco, late": lambda bk: [bk.algorithms.diloco(every=2, delay=2)],
    "diloco, in turns": lambda bk: [bk.algorithms.diloco(every=2, delay=1, fragments=2)],
}


def everything(model, optimizer):
    """Weights, buffers and what the optimizer remembers, as one list of tensors."""
    state = optimizer.state_dict()["state"]
    held = [value for key in sorted(state) for value in state[key].values() if isinstance(value, torch.Tensor)]
    return [*model.state_dict().values(), *held]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def step_of(model, optimizer, rank, step):
    optimizer.zero_grad()
    loss(model, rank, step).backward()
    optimizer.step()


def uneven(algorithms, batches=BATCHES, optimizer=sgd, steps=step_of, bucket_bytes=200, **options):
    """Train inside `join()` on this rank with as many batches as it has."""
    import torch.distributed as dist

    import baguakit as bk

    rank, model = dist.get_rank(), net()
    opt, groups = optimizer(model.parameters()), len(dist.distributed_c10d._world.pg_map)
    with bk.attach(model, opt, *algorithms(bk), bucket_bytes=bucket_bytes) as att:
        with att.join(**options):
            for step in range(batches[rank]):
                steps(model, opt, rank, step)
        engine = att._engine
        launched, rounds = engine.monitor._history.latest(), [route.round for route in engine.routes]
        state = att.state_dict()
    assert sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()) == 0
    assert not opt._optimizer_step_pre_hooks and not opt._optimizer_step_post_hooks
    assert len(dist.distributed_c10d._world.pg_map) == groups
    return everything(model, opt), state, (att.step, launched, rounds)


def even(algorithms, still=lambda step: False, batches=BATCHES, bucket_bytes=200):
    """The run that it stands for: a rank without batches has zero gradients, or none in steps where it stands still."""
    import torch.distributed as dist

    import baguakit as bk

    rank, model = dist.get_rank(), net()
    opt = sgd(model.parameters())
    with bk.attach(model, opt, *algorithms(bk), bucket_bytes=bucket_bytes) as att:
        for step in range(max(batches)):
            opt.zero_grad()
            if step < batches[rank]:
                loss(model, rank, step).backward()
            elif not still(step):
                (0 * loss(model, rank, step)).backward()
            opt.step()
        return everything(model, opt), att.state_dict(), att.step


def equal_states(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_states(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal_states, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
