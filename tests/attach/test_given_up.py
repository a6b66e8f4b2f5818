"""Waits that end when the monitor has given up, though a lane still waits for a rank that is lost."""

import threading
from types import SimpleNamespace

import pytest
import torch
from test_monitor import monitored

from baguakit.flights.checkpoint import save_runner
from baguakit.flights.gradients import Decisions
from baguakit.flights.runner import RuleRunner
from baguakit.keeping import Joint, finite, update_if_finite_
from baguakit.lanes import CpuLane
from baguakit.monitor import PeerError
from baguakit.rules import after_step
from baguakit.runtime.channels import Channel
from baguakit.stages import Mean


@pytest.fixture
def lost():
    """A lane of two ranks whose all-reduce waits until the test ends: the other rank is lost."""
    ended, begun = threading.Event(), threading.Event()

    def all_reduce(x, op):
        begun.set()
        ended.wait()
        raise RuntimeError("Connection closed by peer")

    lane, comm = CpuLane(), SimpleNamespace(size=2, all_reduce=all_reduce)
    yield SimpleNamespace(channel=Channel(0, lane, comm, monitored()[0]), begun=begun, ended=ended)
    ended.set()
    lane.close()


def test_a_rank_decides_alone_what_to_keep_when_the_others_do_not_answer(lost):
    """Also where a later decision waits behind this one, as with delayed gradients."""
    joint, state = Joint(), torch.zeros(3)
    with joint.flight({"": state}, True, lambda: state):
        update_if_finite_(state, torch.ones(3), finite(torch.ones(3)))
    decisions = Decisions(joint, alike=False)
    for _ in range(2):
        decisions.begin([SimpleNamespace(channel=lost.channel, rule=SimpleNamespace(stage=Mean()))])
    assert lost.begun.wait(20)
    lost.channel.monitor.fail("rank 1 is lost")
    decisions.settle_all(0)
    assert torch.equal(state, torch.ones(3))


def test_a_state_whose_flight_has_failed_names_the_rank(lost):
    """An error of the network alone would end a rank of an elastic group that pauses, where it should go on."""
    runner = RuleRunner(0, after_step(Mean(), delay=1), [], lost.channel)
    runner.air[0] = lost.channel.begin("a flight", lambda comm: comm.all_reduce(None, None))
    lost.channel.monitor.hasty = True
    lost.ended.set()
    with pytest.raises(PeerError, match="a flight failed on rank 0"):
        save_runner(runner, {})
