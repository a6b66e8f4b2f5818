"""States saved by earlier versions are resumed from, or refused in one sentence."""

from types import SimpleNamespace

import numpy as np
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


FORMER = {
    "qadam": (
        lambda bk: bk.algorithms.qadam(4, error_feedback=True),
        "during_backward(AdamDirection(4, MinMaxUInt8(), error_feedback=True))",
    ),
    "numbers of numpy": (
        lambda bk: bk.algorithms.top_k(np.float64(0.4)),
        "during_backward(ErrorFeedback(SparseMean(TopK(np.float64(0.4)))))",
    ),
    "qadam, hierarchical": (
        lambda bk: bk.hierarchical(bk.algorithms.qadam(4, (0.8, 0.9))),
        "during_backward(Hierarchical(AdamDirection(4, betas=(0.8, 0.9), MinMaxUInt8())))",
    ),
}


@pytest.mark.parametrize("rule", FORMER)
def test_a_rule_is_known_by_how_it_printed(rule):
    from baguakit.attach.state.checkpoint import check_saved

    make, text = FORMER[rule]
    assert repr(make(bk)) != text
    check_saved([SimpleNamespace(rule=make(bk))], {"0": {"rule": text}})
    with pytest.raises(ValueError, match=r"state is of .*\(.*5.*\), and the rule attached is"):
        check_saved([SimpleNamespace(rule=make(bk))], {"0": {"rule": text.replace("4", "5")}})


def test_a_state_of_qadam_as_it_printed():
    make, text = FORMER["qadam"]

    def older(state):
        state["rules"]["0"]["rule"] = text
        return state

    assert_resumed(make, older)
