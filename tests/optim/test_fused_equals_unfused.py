"""Fused equals unfused: every element-wise optimizer of torch, with all flags that change arithmetic.

Bitwise in float32 where torch's own loop or `foreach` code runs: over 30 steps, with two groups, parameters without
gradients at some steps, and the state that each parameter has. Elsewhere torch's kernels treat the last few values of
a tensor otherwise than the rest, and a value that is last among a parameter's is not last among the flat tensor's: from
equal weights and state, one step differs by at most one rounding of the dtype.
"""

import pytest
import torch
from tiers import slow_unless
from toys import Gradients, equal, groups, parameters, plain_groups, report, same_state, train
from zoo import CASES, CODE, ELEMENT_WISE, HAVE_FUSED, KeepsGradients, MasterWeights, name

from baguakit.optim import fuse, unfuse

CODED = [(case, code) for case in CASES for code in CODE if code != "fused" or case[0] in HAVE_FUSED]
IDS = [f"{name(case)}-{code}" for case, code in CODED]
LOOPS = [pytest.param(*x, marks=[pytest.mark.slow] * (x[1] == "for-loop")) for x in CODED if x[1] != "fused"]
STEPS = 30  # RAdam's rectification begins at the sixth step, ASGD's average after the twentieth (t0)


def make(case, params, code):
    kind, options = case
    grouped = plain_groups(params) if kind is torch.optim.Rprop else groups(params)
    return kind(grouped, lr=0.01, **options, **CODE[code])


def pair(case, code, dtype):
    ours, theirs = parameters(dtype), parameters(dtype)
    return ours, theirs, fuse(make(case, ours, code)), make(case, theirs, code)


@pytest.mark.parametrize("case, code", LOOPS, ids=[i for i in IDS if "fused" not in i])
def test_bitwise_over_thirty_steps(case, code):
    ours, theirs, fused, plain = pair(case, code, torch.float32)
    train(STEPS, Gradients(), ours, theirs, fused, plain)
    assert equal(ours, theirs)
    assert same_state(fused, plain)
    assert report(fused).together > 0


HALVES = (torch.bfloat16, torch.float16)
SUMS_OF_GRADIENTS = ("momentum_buffer", "exp_avg", "grad_avg")


def roundings(key, a, b, before, grad):
    """Return the distance of a and b, in roundings of the largest number that a step made them from and into.

    `before` has all that was known of the parameter before the step.
    """
    numbers = [a, b, before.get(key, torch.zeros_like(a))]
    if grad is not None and key in SUMS_OF_GRADIENTS:
        numbers.append(grad)
    if grad is not None and key == "weights":
        numbers += [0.01 * grad, 0.01 * before.get("momentum_buffer", grad)]
    limits = torch.finfo(a.dtype)
    scale = torch.stack([x.abs().double() for x in numbers]).amax(0).clamp(min=limits.tiny)
    return float(((a - b).abs().double() / (limits.eps * scale)).max())


def snapshot(optimizer, params):
    """Weights, and the state that has a value for each, by parameter."""
    states = [optimizer.state.get(p, {}) for p in params]
    elementwise = [{k: x for k, x in s.items() if torch.is_tensor(x) and x.dim()} for s in states]
    return [{"weights": p.detach(), **s} for p, s in zip(params, elementwise, strict=True)]


@torch.no_grad()
def farthest(case, code, dtype, steps):
    """Step from equal weights and state many times; return the largest differences, in roundings."""
    ours, theirs, fused, plain = pair(case, code, dtype)
    gradients, worst = Gradients(), {"weights": 0.0, "state": 0.0}
    for _ in range(steps):
        gradients.give(ours, theirs)
        before = [{key: x.clone() for key, x in each.items()} for each in snapshot(plain, theirs)]
        fused.step()
        plain.step()
        after = zip(before, snapshot(fused, ours), snapshot(plain, theirs), [p.grad for p in theirs], strict=True)
        for was, mine, other, grad in after:
            assert mine.keys() == other.keys()
            for key, x in mine.items():
                kind = "weights" if key == "weights" else "state"
                worst[kind] = max(worst[kind], roundings(key, x, other[key], was, grad))
                x.copy_(other[key])
    return worst


@pytest.mark.parametrize("case, code", [x for x in CODED if x[1] == "fused"], ids=[i for i in IDS if "fused" in i])
def test_torchs_fused_kernels_within_one_rounding(case, code):
    worst = farthest(case, code, torch.float32, STEPS)
    assert worst["weights"] <= 1 and worst["state"] <= 1


# SGD of 16-bit weights with torch's fused kernel is refused.
HALF = [x for x in CODED if x[1] != "fused" or x[0][0] is not torch.optim.SGD]


@pytest.mark.parametrize(
    "dtype, steps",
    [(torch.bfloat16, 10), *(pytest.param(dtype, 100, marks=pytest.mark.slow) for dtype in HALVES)],
    ids=lambda x: str(x).removeprefix("torch."),
)
@pytest.mark.parametrize(
    "case, code",
    slow_unless([x for x in HALF if x[1] == "foreach"], HALF),
    ids=[f"{name(case)}-{code}" for case, code in HALF],
)
def test_half_precision_within_one_rounding(case, code, dtype, steps):
    """A weight is at most one rounding away; a state at most one for each of the up to three operations behind it.

    SGD with momentum and weight decay puts such a state into the weights in the same step.
    """
    worst = farthest(case, code, dtype, steps)
    through_state = case[0] is torch.optim.SGD and "weight_decay" in case[1]
    assert worst["weights"] <= (3 if through_state else 1) and worst["state"] <= 3


@pytest.mark.parametrize(
    "kind, dtype",
    [
        *((kind, dtype) for kind in ELEMENT_WISE for dtype in (torch.float32, torch.float64)),
        (MasterWeights, torch.bfloat16),
    ],
    ids=str,
)
def test_optimizers_of_users(kind, dtype):
    ours, theirs = parameters(dtype), parameters(dtype)
    fused, plain = fuse(kind(groups(ours)), elementwise=True), kind(groups(theirs))
    gradients = Gradients(absent=kind is not KeepsGradients)
    for _ in range(20):
        gradients.give(ours, theirs)
        fused.step()
        plain.step()
        assert equal([p.grad for p in ours if p.grad is not None], [p.grad for p in theirs if p.grad is not None])
    assert equal(ours, theirs)
    assert same_state(fused, plain)
    assert vars(fused).get("steps") == vars(plain).get("steps")


@pytest.mark.parametrize("lr", [torch.tensor(0.01), 0.01], ids=["tensor", "number"])
def test_rates_that_are_tensors(lr):
    ours, theirs = parameters(), parameters()
    fused, plain = fuse(torch.optim.Adam(ours, lr=lr)), torch.optim.Adam(theirs, lr=lr)
    train(20, Gradients(), ours, theirs, fused, plain)
    assert equal(ours, theirs) and same_state(fused, plain)


def test_complex_parameters():
    ours, theirs = parameters(torch.complex64), parameters(torch.complex64)
    fused, plain = fuse(torch.optim.Adam(ours)), torch.optim.Adam(theirs)
    train(15, Gradients(), ours, theirs, fused, plain)
    assert equal(ours, theirs) and same_state(fused, plain) and report(fused).together > 0


def test_several_dtypes_and_large_parameters_in_one_group():
    def made():
        params = parameters() + parameters(torch.float64) + parameters(torch.bfloat16)
        return [*params, *parameters()], torch.nn.Parameter(torch.linspace(-1, 1, 20_000))

    (ours, mine), (theirs, other) = made(), made()
    fused, plain = fuse(torch.optim.AdamW([mine, *ours])), torch.optim.AdamW([other, *theirs])
    train(20, Gradients(), [*ours, mine], [*theirs, other], fused, plain)
    # A step of Adam in half precision happens to be the same bits: nothing in it is rounded twice.
    exact = [p.dtype is not torch.bfloat16 for p in ours]
    assert equal(
        [p for p, e in zip(ours, exact, strict=True) if e], [p for p, e in zip(theirs, exact, strict=True) if e]
    )
    assert torch.equal(mine, other)
    assert mine.data_ptr() != 0 and report(fused).apart >= 1


def test_unfused_again():
    """Fusing and unfusing at any time changes nothing."""
    ours, theirs = parameters(), parameters()
    fused, plain = torch.optim.NAdam(groups(ours)), torch.optim.NAdam(groups(theirs))
    gradients = Gradients()
    for step in range(30):
        if step % 7 == 3:
            assert fuse(fused) is fused and fuse(fused) is fused
        if step % 7 == 6:
            assert unfuse(fused) is fused
        gradients.give(ours, theirs)
        fused.step()
        plain.step()
    assert equal(ours, theirs) and same_state(fused, plain)
