"""Fused optimizers beside attachments, FSDP2 and compiled steps: bitwise the training without them."""

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from tiers import slow_after
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toys import report
from training import batch, loss

import baguakit as bk
from baguakit.optim import fuse

RULES = {
    "all-reduce": lambda bk: bk.algorithms.gradient_allreduce(),
    "bytegrad": lambda bk: bk.algorithms.bytegrad(bk.compressors.MinMaxUInt8(block=64)),
    "awc": lambda bk: bk.algorithms.decentralized(),
    "atc": lambda bk: bk.algorithms.decentralized(order="atc"),
}


def attached(rule, order, split):
    """Train on this rank with an attachment and an optimizer fused before it, after it, or not at all."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(6, 9), *[nn.Linear(9, 9) for _ in range(10)], nn.Linear(9, 1))
    params = list(model.parameters())
    halves = [{"params": params[:split]}, {"params": params[split:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([half for half in halves if half["params"]], lr=0.01)
    if order == "fuse first":
        fuse(optimizer)
    with bk.attach(model, optimizer, rule(bk)):
        if order == "attach first":
            fuse(optimizer)
        for step in range(6):
            if order == "in the middle" and step == 3:
                fuse(optimizer)
            optimizer.zero_grad()
            loss(model, dist.get_rank(), step).backward()
            optimizer.step()
    told = None if order == "unfused" else report(optimizer)
    states = [optimizer.state[p]["exp_avg_sq"].clone() for p in params]
    return [p.detach() for p in params], states, told and (told.flats, told.together, told.apart)


@pytest.mark.parametrize("rule", slow_after(1, RULES))
def test_attached_in_either_order(rule):
    plain = ranks(2, attached, RULES[rule], "unfused", 12)
    for order in ("fuse first", "attach first", "in the middle"):
        for mine, other in zip(ranks(2, attached, RULES[rule], order, 12), plain, strict=True):
            assert all(torch.equal(p, q) for p, q in zip(mine[0] + mine[1], other[0] + other[1], strict=True))
            assert mine[2][1:] == (24, 0)


@pytest.mark.parametrize("order", ["fuse first", "attach first", "in the middle"])
@pytest.mark.parametrize("split", [24, 12])
def test_all_whose_gradients_are_in_a_bucket_are_stepped_together(order, split):
    for _, _, told in ranks(2, attached, RULES["all-reduce"], order, split):
        assert told == (24 // split, 24, 0)


def sharded(fused, kind, options):
    """Train on this rank with FSDP2; the weights and the state dict, gathered."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model[::2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = kind(model.parameters(), lr=0.01, **options)
    if fused:
        fuse(optimizer)
    for step in range(13):  # of which those from the eleventh on are fused again
        x, y = batch(dist.get_rank(), step)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        if step == 2:
            list(model.parameters())[1].grad = None
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    told = report(optimizer).together if fused else 0
    elementwise = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "momentum_buffer") if k in s]
    whole = StateDictOptions(full_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=whole)
    return weights, state, told, all(type(x) is DTensor for x in elementwise) and len(elementwise)


ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD


OTHERS = [(SGD, {"momentum": 0.9}), (ADAMW, {"foreach": True})]


@pytest.mark.parametrize("size", slow_after(1, [2, 1]))
@pytest.mark.parametrize(
    "kind, options", [(ADAMW, {}), *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_local_shards_of_fsdp2(size, kind, options):
    """Shards are stepped as one, and what the user sees stays distributed, so that checkpoints are FSDP2's own."""
    mine, other = ranks(size, sharded, True, kind, options), ranks(size, sharded, False, kind, options)
    for (weights, state, together, distributed), (plain, states, _, _) in zip(mine, other, strict=True):
        assert together == 6 and distributed == 6
        assert weights.keys() == plain.keys() and all(torch.equal(weights[key], plain[key]) for key in weights)
        assert state["param_groups"] == states["param_groups"]
        for name, values in states["state"].items():
            assert all(torch.equal(state["state"][name][key], x) for key, x in values.items())


@pytest.mark.slow  # importing the compiler takes seconds
@pytest.mark.filterwarnings("ignore")  # of the compiler's own imports
@pytest.mark.parametrize("what", ["model", "step", "loop"])
def test_compiled(what):
    def trained(prepare):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(6)])
        optimizer = prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
        forward = torch.compile(model, backend="eager", fullgraph=True) if what == "model" else model
        step = torch.compile(optimizer.step, backend="eager") if what == "step" else optimizer.step

        def loop(x):
            forward(x).square().mean().backward()
            step()
            optimizer.zero_grad()

        run = torch.compile(loop, backend="eager") if what == "loop" else loop
        for i in range(6):
            run(torch.randn(3, 5, generator=torch.Generator().manual_seed(i)))
        return list(model.parameters()), optimizer

    (ours, fused), (theirs, plain) = trained(fuse), trained(lambda optimizer: optimizer)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    assert report(fused).together == 12
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(fused.state[p]["exp_avg_sq"], plain.state[q]["exp_avg_sq"])
