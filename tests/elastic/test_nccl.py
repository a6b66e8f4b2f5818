"""Ranks that come and go over real NCCL: its groups are made and aborted by the code that makes those of gloo."""

import pytest
import torch
from crew import crew, gather, step
from test_joining import weights_after

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("moment", ["now", "backward", "flight", "optimizer", "stepped"])
def test_survivors_go_on_as_a_smaller_group(moment):
    with crew("gradient_allreduce()", device="cuda", timeout=10.0) as ranks:
        both = ranks.start("a", "b")
        gather(both)
        both[1].tell("die", moment)
        both[1].tell("step", 1)
        (found,) = step(both[:1], 4)
        assert found["ranks"] == 1
        assert torch.equal(found["weights"], weights_after(found["present"], both))


@pytest.mark.parametrize("algorithm", ["bytegrad(error_feedback=True)", "decentralized()", "diloco(every=2)"])
def test_a_rank_that_joins_takes_weights_and_momentum(algorithm):
    with crew(algorithm, device="cuda", momentum=0.5) as ranks:
        first = ranks.start("a")
        first[0].hear("attached")
        (before,) = step(first, 4)
        both = first + ranks.start("b")
        first[0].tell("gather", 2)
        assert both[1].hear("attached")["step"] >= before["step"]
        found = step(both, 4)
        assert {each["ranks"] for each in found} == {2}
        assert all(torch.isfinite(each["weights"]).all() for each in found)
        assert len(found[0]["momentum"]) == len(found[1]["momentum"]) > 0


def test_a_rank_that_leaves_costs_no_step():
    with crew("gradient_allreduce()", device="cuda") as ranks:
        both = ranks.start("a", "b")
        gather(both)
        step(both, 2)
        both[1].tell("leave")
        both[1].tell("step", 10**9)
        both[0].tell("gather", 1)
        found = both[0].hear("stepped")
        both[1].hear("left")
        assert torch.equal(found["weights"], weights_after(found["present"], both))
