"""Lanes run work in order, beside the caller, and end when they are told to."""

import contextlib
import threading
import time

import pytest
import torch

from baguakit.lanes import cuda, lane

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
def test_work_runs_in_order_and_returns(device):
    way, seen = lane(torch.device(device)), []
    flights = [way.run(lambda i=i: (seen.append(i), torch.full((3,), float(i), device=device))[1]) for i in range(20)]
    assert [float(f.result()[0]) for f in flights] == list(range(20)) and seen == list(range(20))
    assert all(f.done() for f in flights)
    way.close()


def test_a_cpu_lane_is_a_thread_that_ends():
    way = lane(torch.device("cpu"), "a lane of mine")
    assert way.run(lambda: threading.current_thread().name).result() == "a lane of mine"
    assert not way.run(torch.is_grad_enabled).result()
    way.close()
    assert "a lane of mine" not in [t.name for t in threading.enumerate()]


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_is_raised_by_the_flight_and_the_lane_goes_on(device):
    way = lane(torch.device(device))
    bad, good = way.run(lambda: 1 / 0), way.run(lambda: 5)
    with pytest.raises(ZeroDivisionError):
        bad.result()
    assert good.result() == 5
    way.close()


def test_a_flight_can_be_failed_while_it_is_stuck():
    way, stuck = lane(torch.device("cpu")), threading.Event()
    flight, after = way.run(stuck.wait), way.run(lambda: 1)
    threading.Timer(0.1, lambda: (flight.fail(TimeoutError("late")), after.fail(TimeoutError("late")))).start()
    with pytest.raises(TimeoutError, match="late"):
        flight.result()
    began = time.monotonic()
    way.close(wait=False)
    assert time.monotonic() - began < 1.0
    stuck.set()


class Stream:
    """Of a device; keeps a list of the streams that it waits for."""

    def __init__(self, device=None, priority=0):
        self.device, self.priority, self.waits = device, priority, []

    def wait_stream(self, other):
        self.waits.append(other)

    def wait_event(self, event):
        pass


def test_a_cuda_lane_waits_for_the_streams_it_follows(monkeypatch):
    """Besides the current one, for which every flight waits."""
    here, other, third = Stream(), Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    way = lane(torch.device("cuda", 0))
    way.follow([here, other, third])
    assert way.stream.waits == [other, third] and here.waits == []


@pytest.mark.parametrize("priority", (0, -1))
def test_every_cuda_lane_has_the_one_priority(monkeypatch, priority):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(cuda, "PRIORITY", priority)
    assert lane(torch.device("cuda", 0)).stream.priority == priority


def test_an_error_in_a_launch_is_the_flights_on_a_cuda_lane_too(monkeypatch):
    """Whoever waits for the flight asks the monitor whose fault it is; who launched it does not."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(cuda, "moment", lambda device: None)
    flight = lane(torch.device("cuda", 0)).run(lambda: 1 / 0)
    assert flight.done()
    with pytest.raises(ZeroDivisionError):
        flight.result()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_lane_sees_what_came_before_and_is_waited_for_on_the_stream():
    """A long kernel, a flight that reads its result, a kernel that reads the flight's; the host never waits."""
    device = torch.device("cuda")
    way, user = lane(device), torch.cuda.Stream()
    x = torch.zeros(1 << 20, device=device)
    (x + 1) * 2  # CUDA loads a kernel at its first launch, which may wait for those before
    torch.cuda.synchronize()
    with torch.cuda.stream(user):
        torch.cuda._sleep(1_000_000_000)
        x.add_(1)
        flight = way.run(lambda: x * 2)
        assert not flight.done()
        y = flight.result() + 1
        del flight
        junk = [torch.full((1 << 20,), 7.0, device=device) for _ in range(8)]
    torch.cuda.synchronize()
    assert torch.equal(y, torch.full_like(y, 3.0)) and len(junk) == 8
