"""A rank is lost, the transport reports nothing, and the hosts of the others have passed their flights, as on a GPU."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from baguakit.lanes import Flight
from baguakit.monitor import Collective, Monitor


class OnDevice(Flight):
    """Work that a device has done or never will, and that its host does not wait for."""

    on_device = True

    def __init__(self, arrived):
        self.arrived, self.asked = arrived, 0

    def done(self):
        self.asked += 1
        return self.arrived or self._error is not None

    def result(self):
        return None


def passed_by(monitor, arrived, step, age=0.0):
    """A flight that the host has passed."""
    flight = Collective(label="bucket 0", step=step, flight=OnDevice(arrived), launched=time.time() - age)
    monitor.launched(0, flight)
    monitor.wait_for(flight)
    return flight.flight


class Turned:
    """Ranks whose monitors are turned by hand, a heartbeat of their clocks at a time, or at once if they want to."""

    def __init__(self, size, timeout=40.0):
        store = dist.HashStore()
        self.monitors = [Monitor(store, rank, size, timedelta(seconds=timeout), lambda: None) for rank in range(size)]
        for monitor in self.monitors:
            monitor.watch.board.arrive(monitor.watch._written)
            monitor.watch.judge.look = lambda clock=monitor.watch.judge: clock.now

    def turn(self, ranks, beats=1):
        for _ in range(beats):
            for monitor in (self.monitors[rank] for rank in ranks):
                monitor.watch.judge.now += monitor.beat
                for _ in range(2):
                    if monitor.error is None:
                        monitor.watch.turn()
                    if monitor.watch._pause > monitor.beat / 2:
                        break

    def until_named(self, ranks, most):
        """The heartbeats until all of these ranks have given up."""
        for beats in range(most + 1):
            if all(self.monitors[rank].error for rank in ranks):
                return beats
            self.turn(ranks)
        raise AssertionError([str(self.monitors[rank].error) for rank in ranks])


@pytest.mark.parametrize(("size", "lost"), [(2, 1), (3, 0), (3, 2), (4, 1), (4, 3), (9, 5)])
def test_all_name_a_silent_rank_within_a_quarter_more_than_their_patience_and_two_seconds(size, lost):
    ranks = Turned(size)
    for monitor in ranks.monitors:
        passed_by(monitor, True, 0)
    ranks.turn(range(size), beats=size)
    rest = [rank for rank in range(size) if rank != lost]
    for rank in rest:
        passed_by(ranks.monitors[rank], False, 1, age=30.0)
    patience = ranks.monitors[0].patience
    ranks.until_named(rest, most=int(1.25 * patience + 2))
    said = {str(ranks.monitors[rank].error) for rank in rest}
    assert len(said) == 1 and said.pop().startswith(f"rank {lost} is dead: no sign of it for ")


def test_a_verdict_is_obeyed_by_a_rank_whose_host_has_passed_its_flight():
    ranks = Turned(3)
    ranks.turn(range(3), beats=3)
    for rank in (0, 1):
        passed_by(ranks.monitors[rank], False, 0, age=30.0)
    ranks.monitors[0].broken = lambda: "COMM_ERROR"  # of a socket; rank 1 has none, and is told nothing
    silence = ranks.monitors[0].silence
    beats = ranks.until_named((0, 1), most=int(silence) + 4)
    assert beats < ranks.monitors[1].patience
    assert str(ranks.monitors[1].error).startswith("rank 2 is dead")


def test_while_all_are_heard_no_device_is_asked():
    """The question would end the capture of a graph."""
    ranks = Turned(3)
    flights = [passed_by(monitor, False, 0, age=30.0) for monitor in ranks.monitors]
    ranks.turn(range(3), beats=30)
    assert [flight.asked for flight in flights] == [0, 0, 0]
    assert not any(monitor.watch._lease.silent for monitor in ranks.monitors)


def test_a_silent_rank_that_nobody_waits_for_is_nobodys_matter_once_it_is_heard_again():
    ranks = Turned(3)
    flights = [passed_by(monitor, True, 0, age=30.0) for monitor in ranks.monitors]
    ranks.turn(range(3), beats=3)
    ranks.turn([0, 1], beats=20)
    assert [flight.asked for flight in flights] == [1, 1, 0]
    ranks.turn(range(3), beats=8)
    assert [monitor.error for monitor in ranks.monitors] == [None] * 3
    assert ranks.monitors[0].watch._lease.rank == -1


def test_a_rank_whose_store_is_gone_asks_for_what_its_host_has_passed():
    """Rank 0 held the store, and is lost."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    monitor = Monitor(client, 1, 2, timedelta(seconds=40), lambda: None)
    passed_by(monitor, False, 0, age=30.0)
    monitor.start()
    del server
    while monitor.error is None:
        monitor.watch.wake.wait(0.01)
        monitor.watch.wake.set()
    assert "cannot reach the store any more" in str(monitor.error)
    monitor.leave()
