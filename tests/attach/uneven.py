"""Training inside `att.join()`, with as many batches as a rank has, and the run that it stands for."""

import torch
import torch.distributed as dist
from everything import ALGORITHMS, averages_gradients, joins, made
from training import loss, net, sgd

import baguakit as bk
from baguakit.rules import rules_of

BATCHES = [5, 2, 0]  # by rank
LONGEST = max(BATCHES)
JOINING = [each for each in ALGORITHMS if joins(made(each))]
GRADIENTS = [each for each in JOINING if averages_gradients(made(each))]
WEIGHTS = [
    *(each for each in JOINING if all(rule.what == "data" for rule in rules_of(made(each)))),
    "diloco(every=2, delay=2)",
    "diloco(every=2, fragments=2, delay=1)",
]


def everything(model, optimizer):
    """Return weights, buffers and the state of the optimizer as one list of tensors."""
    state = optimizer.state_dict()["state"]
    held = [value for key in sorted(state) for value in state[key].values() if isinstance(value, torch.Tensor)]
    return [*model.state_dict().values(), *held]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def step_of(model, optimizer, rank, step):
    optimizer.zero_grad()
    loss(model, rank, step).backward()
    optimizer.step()


def uneven(algorithm, batches=BATCHES, optimizer=sgd, steps=step_of, bucket_bytes=200, **options):
    """Train inside `join()` on this rank with as many batches as it has."""
    rank, model = dist.get_rank(), net()
    opt, groups = optimizer(model.parameters()), len(dist.distributed_c10d._world.pg_map)
    with bk.attach(model, opt, made(algorithm), bucket_bytes=bucket_bytes) as att:
        with att.join(**options):
            for step in range(batches[rank]):
                steps(model, opt, rank, step)
        engine = att._life
        launched, rounds = engine.runtime.monitor.air.latest(), [runner.round for runner in engine.runners]
        state = att.state_dict()
    assert sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()) == 0
    assert not opt._optimizer_step_pre_hooks and not opt._optimizer_step_post_hooks
    assert len(dist.distributed_c10d._world.pg_map) == groups
    return everything(model, opt), state, (att.step, launched, rounds)


def even(algorithm, still=lambda step: False, batches=BATCHES, bucket_bytes=200):
    """The run that it stands for: a rank without batches has zero gradients, or none in steps where it stands still."""
    rank, model = dist.get_rank(), net()
    opt = sgd(model.parameters())
    with bk.attach(model, opt, made(algorithm), bucket_bytes=bucket_bytes) as att:
        for step in range(max(batches)):
            opt.zero_grad()
            if step < batches[rank]:
                loss(model, rank, step).backward()
            elif not still(step):
                (0 * loss(model, rank, step)).backward()
            opt.step()
        return everything(model, opt), att.state_dict(), att.step


def equal_states(a, b):
    """Compare all but what a state says of the run that it was saved in."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(key == "saved" or equal_states(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal_states, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
