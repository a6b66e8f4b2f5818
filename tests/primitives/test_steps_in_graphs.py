"""`torch.compile` passes over optimizer steps: one graph without breaks, and the same bits."""

import warnings

import pytest
import torch
from drawn import values
from tiers import slow_after

from baguakit.compressors import MinMaxUInt8
from baguakit.optim import steps
from baguakit.primitives import adam_step_, adamw_step_, gradient_norm, lion_step_, sgd_step_

CODEC = MinMaxUInt8()


def sgd(p, g, u, v, found, count):
    sgd_step_(p, g, u, 3, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def clipped_adam(p, g, u, v, found, count):
    clip = (1 / (gradient_norm(g, found) + 1e-6)).clamp(max=1)
    adam_step_(p, g, u, v, count, lr=torch.tensor(0.1), clip=clip, found_inf=found)


def adamw_with_masters(p, g, u, v, found, count):
    half = [x.bfloat16() for x in p]
    adamw_step_(half, g, u, v, 0, master=p)
    p[0].add_(half[0])


def drawn_lion(p, g, u, v, found, count):
    half = [x.bfloat16() for x in p]
    lion_step_(half, g, u, 5, lr=0.1, weight_decay=0.1, key=7)
    for x, y in zip(p, half, strict=True):
        x.copy_(y)


def packed_adamw(p, g, u, v, found, count):
    packed = CODEC.compress(g[0].view(1, -1))
    adamw_step_(p[0], None, u[0], v[0], 0, packed=packed, compressor=CODEC)


@pytest.mark.parametrize("step", slow_after(2, [sgd, clipped_adam, adamw_with_masters, drawn_lion, packed_adamw]))
def test_compiled_whole_a_step_gives_the_same_bits(step):
    def ready():
        shapes = [(300,), (7, 5), ()]
        p, g, u = (values(seed, shapes=shapes) for seed in range(3))
        return p, g, u, [x.square() for x in u], torch.zeros(()), torch.tensor(2.0)

    expected, found = ready(), ready()
    step(*expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        torch.compile(step, fullgraph=True, backend="aot_eager")(*found)
    for a, b in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(found[0][0], ready()[0][0])


def test_the_operators_keep_the_rules_of_operators():
    (p, g, m, v), number = ([x] for x in values(shapes=[9] * 4)), torch.tensor(1.0)
    options, taken = [0.9, 0.999, 1e-8, 0.0, 1.0], torch.tensor(2)
    given = ("Adam", options, "m v", p, g, m, [x.square() for x in v], [torch.empty(0)], number, taken, number, number)
    torch.library.opcheck(steps._operator, (*given, torch.tensor(0.0), None, None, 512))
    torch.library.opcheck(steps._norm, (g, torch.tensor(0.0)))
