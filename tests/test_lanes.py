"""Lanes run work in order, beside the caller, and end when they are told to."""

import contextlib
import threading
import time
from contextvars import ContextVar

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


def test_an_error_in_a_launch_is_the_flights_on_a_cuda_lane_too(monkeypatch):
    """Whoever waits for the flight asks the monitor whose fault it is; who launched it does not."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(cuda, "moment", lambda device: None)
    flight = lane(torch.device("cuda", 0)).run(lambda: 1 / 0)
    assert flight.done()
    with pytest.raises(ZeroDivisionError):
        flight.result()


def phases(seen, k, fails="", where=lambda: ""):
    """A flight of three phases, which tell when and where they are done."""

    def work():
        for phase in "abc":
            seen.append((where(), f"{phase}{k}"))
            if phase == fails:
                raise KeyError(k)
            if phase != "c":
                yield torch.full((1,), float(k))
        return k

    return work


@pytest.mark.parametrize("device", DEVICES)
def test_a_phase_reads_what_the_one_before_it_made(device):
    way, xs = lane(torch.device(device)), torch.arange(8.0, device=device).repeat(1 << 16, 1).T.contiguous()

    def work(x):
        twice = x * 2
        yield twice
        more = twice + 1
        yield more
        return more * 3

    flights = [way.run(lambda x=x: work(x), in_phases=True) for x in xs]
    for x, flight in zip(xs, flights, strict=True):
        assert torch.equal(flight.result(), (x * 2 + 1) * 3)
    way.close()


def on(seen, place):
    return [phase for where, phase in seen if where == place]


def test_phases_fly_by_turns_on_two_threads():
    way, seen = lane(torch.device("cpu"), "one"), []
    flights = [
        way.run(phases(seen, k, where=lambda: threading.current_thread().name), in_phases=True) for k in (1, 2, 3)
    ]
    assert [flight.result() for flight in flights] == [1, 2, 3]
    assert on(seen, "one") == ["a1", "a2", "c1", "a3", "c2", "c3"] and on(seen, "one, beside") == ["b1", "b2", "b3"]
    assert all(len(flight.phases) == 3 and flight.seconds()[0] >= 0 for flight in flights)
    assert way.run(phases(seen, 4, where=lambda: threading.current_thread().name)).result() == 4
    assert on(seen, "one")[-3:] == ["a4", "b4", "c4"]
    way.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("one")]


def test_the_last_phase_is_due_when_other_work_comes_or_someone_waits():
    way, seen = lane(torch.device("cpu")), []
    flight = way.run(phases(seen, 1), in_phases=True)
    while not flight.held:
        assert not flight.done()
    assert on(seen, "") == ["a1", "b1"]
    way.run(lambda: seen.append(("", "other")))
    assert flight.result() == 1 and not flight.held
    way.flush()
    assert way.run(list).result() == [] and on(seen, "") == ["a1", "b1", "c1", "other"]
    last = way.run(phases(seen, 2), in_phases=True)
    way.flush()
    assert last._gate.acquire(timeout=60) and last.done() and not last.held
    way.close()


@pytest.mark.parametrize("phase", "abc")
def test_an_error_in_a_phase_is_raised_by_the_flight_and_the_lanes_go_on(phase):
    way, seen = lane(torch.device("cpu")), []
    flights = [
        way.run(phases(seen, 1), in_phases=True),
        way.run(phases(seen, 2, fails=phase), in_phases=True),
        way.run(phases(seen, 3), in_phases=True),
    ]
    with pytest.raises(KeyError):
        flights[1].result()
    assert flights[0].result() == 1 and flights[2].result() == 3
    way.close()


def test_phases_keep_their_context():
    """A value that a phase sets is there in the next phases of its flight, and in no other flight."""
    way, number = lane(torch.device("cpu")), ContextVar("number", default=0)

    def work(k):
        number.set(k)
        yield
        found = number.get()
        yield
        return found, number.get()

    flights = [way.run(lambda k=k: work(k), in_phases=True) for k in (1, 2, 3)]
    assert [flight.result() for flight in flights] == [(1, 1), (2, 2), (3, 3)] and way.run(number.get).result() == 0
    way.close()


def test_phases_fly_by_turns_on_two_streams(monkeypatch):
    """Each waits for the event of the phase before, and memory that it reads stays until then."""
    given, here = [], []

    class Ordered(Stream):
        def wait_event(self, event):
            given.append((self, "waits for", event))

    class Read(torch.Tensor):
        is_cuda, is_cpu = True, False

        def record_stream(self, stream):
            given.append((stream, "reads", int(self)))

    @contextlib.contextmanager
    def at(stream):
        here.append(stream)
        yield
        here.pop()

    def work(k):
        for phase in "abc":
            given.append((here[-1], phase, k))
            if phase != "c":
                yield [torch.tensor(k).as_subclass(Read)]
        return k

    monkeypatch.setattr(torch.cuda, "Stream", Ordered)
    monkeypatch.setattr(torch.cuda, "stream", at)
    monkeypatch.setattr(cuda, "moment", lambda device: len(given))
    way = lane(torch.device("cuda", 0))
    way.run(lambda: work(1), in_phases=True)
    way.run(lambda: work(2), in_phases=True)
    way.run(lambda: given.append((here[-1], "other", 0)))
    done = [(stream is way.stream, what, k) for stream, what, k in given if what in (*"abc", "reads", "other")]
    assert done == [
        (True, "a", 1),
        (False, "reads", 1),
        (False, "b", 1),
        (True, "a", 2),
        (False, "reads", 2),
        (False, "b", 2),
        (True, "reads", 1),
        (True, "c", 1),
        (True, "reads", 2),
        (True, "c", 2),
        (True, "other", 0),
    ]
    # An event is the number of what had been given when it was recorded: behind the phase before.
    for phase, before in (("b", "a"), ("c", "b")):
        for k in (1, 2):
            at_phase = next(i for i, (_, what, which) in enumerate(given) if (what, which) == (phase, k))
            waits = [
                event
                for stream, what, event in given[:at_phase]
                if what == "waits for" and stream is given[at_phase][0]
            ]
            behind = next(i for i, (_, what, which) in enumerate(given) if (what, which) == (before, k)) + 1
            assert waits[-1] == behind


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
