"""The monitor by itself: whom it asks, what it makes of an error of the network, and what ends when it gives up."""

import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from baguakit.flights.checkpoint import save_runner
from baguakit.flights.life import Decisions
from baguakit.flights.runner import RuleRunner
from baguakit.keeping import Joint, finite, update_if_finite_
from baguakit.lanes import CpuLane, Flight
from baguakit.monitor import Collective, Monitor, PeerError
from baguakit.monitor.records import Board, Record
from baguakit.rules import after_step
from baguakit.runtime.runtime import Channel
from baguakit.stages import Mean


class EndlessFlight(Flight):
    """A flight that ends by failing only."""

    def result(self):
        if self._error is None:
            raise AssertionError("it would wait without end")
        raise self._error


class CountingFlight(Flight):
    def __init__(self, arrived=False):
        self.arrived, self.asked, self.error = arrived, 0, None

    def done(self):
        self.asked += 1
        return self.arrived

    def fail(self, error):
        self.error = error


def launched(age, flight):
    """A flight that was launched `age` seconds ago."""
    return Collective(label=f"a flight of {age:g} s", flight=flight, launched=time.time() - age)


def monitored(timeout=600.0, broken=str):
    """Rank 0 of two, whose threads do not run, and how often it has given up. Rank 1 has written once."""
    store, aborts = dist.HashStore(), []
    monitor = Monitor(store, 0, 2, timedelta(seconds=timeout), lambda: aborts.append(1), broken)
    for rank in (1, 0):
        Board(store, rank, 2).arrive(Record(1, {}))
    return monitor, aborts


def test_no_flight_is_asked_before_two_heartbeats():
    """On CUDA the question is an event query, which ends a graph capture that the user has begun."""
    monitor, _ = monitored()
    assert monitor.beat == 1.0
    young = [launched(age, CountingFlight()) for age in (0.0, 1.5)]
    for each in young:
        monitor.launched(0, each)
    for _ in range(5):
        monitor.watch.turn()
    assert [each.flight.asked for each in young] == [0, 0]


def test_an_error_of_the_network_is_told_once_nobody_is_found_to_blame():
    error = [""]
    monitor, aborts = monitored(broken=lambda: error[0])
    late = launched(10.0, CountingFlight())
    monitor.launched(0, late)
    monitor.watch.turn()
    error[0] = "COMM_ERROR"
    monitor.watch.turn()
    assert monitor.error is None and not aborts
    monitor.watch._broke -= monitor.inquiry + 1
    monitor.watch.turn()
    assert str(monitor.error) == "a flight of 10 s failed on rank 0: NCCL reports COMM_ERROR"
    assert late.flight.error is monitor.error and len(aborts) == 1


@pytest.mark.parametrize(("error", "named"), {"": False, "COMM_ERROR": True}.items())
def test_with_an_error_of_the_network_a_silent_rank_is_dead_sooner(error, named):
    monitor, _ = monitored(broken=lambda: error)
    monitor.launched(0, launched(10.0, CountingFlight()))
    monitor.watch.turn()
    seen, clock = monitor.watch.judge.seen, monitor.watch.judge
    silent = (monitor.silence + monitor.patience) / 2
    seen[1] = (seen[1][0], clock.now - silent)
    monitor.watch.turn()
    assert (monitor.error is not None) == named
    assert not named or str(monitor.error).startswith("rank 1 is dead: no sign of it for")


def test_a_flight_that_takes_off_while_the_monitor_gives_up_ends_too():
    """Another thread gave up between the launch's own question and its entry: an elastic rank waited without end."""
    monitor, aborts = monitored()
    early = launched(0.0, EndlessFlight())
    monitor.launched(0, early)
    monitor.fail("rank 1 is lost")
    late = launched(0.0, EndlessFlight())
    monitor.launched(0, late)
    for each in (early, late):
        with pytest.raises(PeerError, match="rank 1 is lost"):
            monitor.wait_for(each)
    assert aborts == [1]


def test_no_flight_takes_the_place_of_flights_that_were_dropped():
    """Its messages would meet those of the dropped flights on another rank, and gloo ends the process."""
    monitor, _ = monitored()
    blocked, sent = threading.Event(), []

    class Racing(CpuLane):
        def run(self, work, name=""):
            if name == "the third":  # training has looked, and the monitor gives up now
                monitor.fail("rank 1 is lost")
            return super().run(work, name)

    channel = Channel(0, Racing(), None, monitor)
    flights = [
        channel.begin(name, work)
        for name, work in (
            ("the first", lambda comm: blocked.wait()),
            ("the second", lambda comm: sent.append("the second")),
            ("the third", lambda comm: sent.append("the third")),
        )
    ]
    for each in flights:
        with pytest.raises(PeerError, match="rank 1 is lost"):
            monitor.wait_for(each)
    blocked.set()
    channel.lane.close()  # it waits for the lane's thread
    assert sent == []


class DeviceFlight(CountingFlight):
    """Work on a GPU: the host passes it as soon as it is launched."""

    on_device = True

    def result(self):
        pass


@pytest.mark.parametrize(("age", "error", "says"), [(10.0, "COMM_ERROR", "dead"), (700.0, "", "late")])
def test_work_on_a_gpu_that_the_host_has_passed_is_watched(age, error, says):
    """While training stands in `torch.cuda.synchronize`, no flight is in the air on the host."""
    said = [""]
    monitor, _ = monitored(broken=lambda: said[0])
    done, passed = (launched(age, DeviceFlight(arrived)) for arrived in (True, False))
    for lane, each in enumerate((done, passed)):
        monitor.launched(lane, each)
        monitor.wait_for(each)
    said[0] = error
    monitor.watch.turn()
    clock, seen = monitor.watch.judge, monitor.watch.judge.seen
    assert monitor.watch._written.waiting.what == passed.label
    seen[1] = (seen[1][0], clock.now - monitor.patience - 1)
    monitor.watch.turn()
    assert str(monitor.error).startswith(f"rank 1 is {says}: ")
    assert done.flight.asked == 1  # it is not held any more


def test_a_message_on_a_gpu_that_never_comes_ends_at_the_timeout():
    """No other rank has a launch for it, so that none is at fault that lives."""
    monitor, _ = monitored(timeout=6.0)
    message = launched(10.0, DeviceFlight())
    monitor.air.watch(message)
    monitor.watch.turn()
    monitor.watch.turn()
    assert str(monitor.error) == f"{message.label} has not arrived within the timeout of 6 s"


class AbortedFlight(CountingFlight):
    """Work on a GPU, whose end CUDA reports also when an abort has ended it: here at the first look."""

    on_device = True

    def done(self):
        arrived = super().done()
        if self.asked == 1:
            self.monitor.fail("rank 1 is lost")
        return arrived

    def result(self):
        if self.error is not None:
            raise self.error
        return "half a sum"


def test_what_an_abort_has_ended_on_a_gpu_is_no_result_where_ranks_come_and_go(capfd):
    flight = AbortedFlight()

    def abort():
        flight.arrived = True

    flight.monitor = monitor = Monitor(dist.HashStore(), 0, 2, timedelta(seconds=600), abort)
    monitor.device, monitor.hasty = torch.device("cuda", 0), True
    waited_for = launched(0.0, flight)
    monitor.launched(0, waited_for)
    with pytest.raises(PeerError, match="rank 1 is lost"):
        monitor.wait_for(waited_for)
    assert flight.asked == 2


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
    decisions.settle(alone=True)
    assert torch.equal(state, torch.ones(3))


def test_a_state_whose_flight_has_failed_names_the_rank(lost):
    """An error of the network alone would end a rank of an elastic group that pauses, where it should go on."""
    runner = RuleRunner(0, after_step(Mean(), delay=1), [], lost.channel)
    runner.air[0] = lost.channel.begin("a flight", lambda comm: comm.all_reduce(None, None))
    lost.channel.monitor.hasty = True
    lost.ended.set()
    with pytest.raises(PeerError, match="a flight failed on rank 0"):
        save_runner(runner, {})
