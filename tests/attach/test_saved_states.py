"""States saved by version 0.2.0 are loaded bit for bit.

`python tests/attach/test_saved_states.py FILE` writes such a file with the version at hand.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from training import flat, net_and_sgd, run_steps

import baguakit as bk

SAVED = Path(__file__).with_name("states-0.2.0.pt")  # {algorithm: the state of each rank}
STEPS = 5


PAPER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}  # the options of `diloco` then


def algorithms(bk):
    """One of each kind of memory: residuals, momenta, replicas, anchors, factors, weights in flight."""
    a, s = bk.algorithms, bk.stages
    return {
        "bytegrad": a.bytegrad(),
        "error feedback, 4 bits": bk.during_backward(
            s.ErrorFeedback(s.CompressedMean(bk.compressors.UInt4(stochastic=True)))
        ),
        "top_k": a.top_k(0.4),
        "power_sgd": a.power_sgd(rank=1),
        "qadam": a.qadam(2, error_feedback=True),
        "gradient_tracking": a.gradient_tracking(),
        "decentralized awc": a.decentralized(),
        "decentralized atc": a.decentralized(order="atc"),
        "low_precision_decentralized": a.low_precision_decentralized(),
        "choco": a.choco(bk.topology.OnePeerExact(), gamma=1.0),
        "push_sum": a.push_sum(bk.topology.OnePeerExponential()),
        "local_sgd": a.local_sgd(every=2),
        "diloco": a.diloco(every=4, delay=2, fragments=2, **PAPER),
        "diloco with Adam": a.diloco(2, torch.optim.Adam, lr=0.1),
        "async_model_average": a.async_model_average(warmup_steps=2),
    }


def saved(make, state=None):
    """Train for some steps, or load a state, and return the state."""
    model, optimizer = net_and_sgd()
    with bk.attach(model, optimizer, algorithms(bk)[make], bucket_bytes=300) as att:
        if state is not None:
            att.load_state_dict(state[dist.get_rank()])
        run_steps(model, optimizer, range(STEPS if state is None else 0))
        return att.state_dict()


def all_saved(states=None):
    return {make: saved(make, states and states[make]) for make in algorithms(bk)}


def unequal(a, b, at=""):
    """Yield where two states differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted((a.keys() | b.keys()) - {"saved"}):  # earlier versions saved no seal
            yield from unequal(a.get(key), b.get(key), f"{at}/{key}")
    elif not (torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b):
        yield at


def test_states_saved_before_are_loaded_bit_for_bit():
    before = torch.load(SAVED, weights_only=True)
    after = ranks(2, all_saved, before)
    for make, states in before.items():
        for rank, state in enumerate(states):
            assert not list(unequal(state, after[rank][make])), make


def test_a_state_with_an_outer_momentum_is_not_loaded_where_the_ranks_choose_it():
    """By default the momentum followed no ranks: such a state is loaded by the options that it names."""

    def run(state):
        model, optimizer = net_and_sgd()
        said = r"^this state is of after_step\(OuterStep\(torch.optim.SGD, lr=0.7, momentum=0.9"
        rule = bk.algorithms.diloco(every=4, delay=2, fragments=2)
        with bk.attach(model, optimizer, rule) as att, pytest.raises(ValueError, match=said):
            att.load_state_dict(state)

    ranks(1, run, torch.load(SAVED, weights_only=True)["diloco"][0])


def test_a_state_of_another_layout_is_refused():
    def run(state):
        with pytest.raises(ValueError, match=r'^state\["version"\] is 1, not 2$'):
            saved("top_k", [{**state, "version": 2}] * 2)

    ranks(2, run, torch.load(SAVED, weights_only=True)["top_k"][0])


if __name__ == "__main__":
    made = ranks(2, all_saved)
    torch.save({make: [states[make] for states in made] for make in made[0]}, sys.argv[1])


def resumed(make, older, steps=(3, 6)):
    """The weights after some steps, taken up in the middle from what `older` makes of the state."""
    model, optimizer = net_and_sgd()
    state = None
    for start, stop in zip((0, *steps), steps, strict=False):
        with bk.attach(model, optimizer, make(bk), broadcast=False) as att:
            if state is not None:
                state.pop("saved")
                att.load_state_dict(older(state))
            run_steps(model, optimizer, range(start, stop))
            state = att.state_dict()
    return flat(model)


def assert_resumed(make, older):
    ours, whole = ranks(2, resumed, make, older), ranks(2, resumed, make, lambda state: state)
    assert all(torch.equal(a, b) for a, b in zip(ours, whole, strict=True))


def test_the_layout_of_power_sgd():
    """Once (matrices, 3) and saved; now found out from the bucket."""

    def older(state):
        state["rules"]["0"]["own"]["0.inner.layout"] = torch.tensor([(0, 7, 1), (8, 7, 10), (85, 10, 6)])
        return state

    assert_resumed(lambda bk: bk.algorithms.power_sgd(rank=1), older)


def test_factors_of_other_shapes_are_refused():
    def older(state):
        own = state["rules"]["0"]["own"]
        own["0.inner.q.0"] = own["0.inner.q.0"].repeat(2, 1)
        return state

    def run():
        with pytest.raises(ValueError, match=r"holds a tensor \(\d+, 1\) as 0.inner.q.0 of .*, and \(\d+, 1\) is here"):
            resumed(lambda bk: bk.algorithms.power_sgd(rank=1), older)

    ranks(2, run)
