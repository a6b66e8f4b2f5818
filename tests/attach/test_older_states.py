"""States saved by earlier versions are resumed from, or refused in one sentence."""

import pytest
import torch
from pool import ranks
from training import flat, net_and_sgd, run_steps

import baguakit as bk


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
