"""Links that are cut, hosts that stand still or die: a sentence in time, nothing left behind, and no weight changed."""

import json
import sys
import time

import late_device
import pytest
from laboratory import ROOT, needs_root

from bench.netlab import Lab

pytestmark = [needs_root, pytest.mark.slow]  # the hosts of each import torch
TIMEOUT = 3.0  # of attachments that are to fail
PATIENT = 40.0  # of those that are not: a host is taken for dead after a quarter of it
SOON = 60.0  # for what must come about, on a machine that is busy with other things
QUIET = 0.3  # several steps
FAR = {"nodes": 2, "between": "100mbit", "delay": "25ms"}  # two hosts in two cities
LATE = pytest.param("late", marks=pytest.mark.skipif(not late_device.supported(), reason="no devices in Python"))
on_devices = pytest.mark.parametrize("device", ["cpu", LATE])  # the latter's tensors go through the memory of the host
NO_ANSWER = ("PeerError: rank 1 has had no answer from the store", "the link between the two hosts is down, or")


class Trainings:
    """Hosts at work on some trainings, one after another (see `failing_host`), and what they have said so far."""

    def __init__(self, lab, trainings, **environment):
        words = [sys.executable, str(ROOT / "tests" / "bench" / "failing_host.py"), json.dumps(trainings)]
        self.ranks = lab.start(words, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment})
        self.lab, self.at = lab, -1

    def said(self, host):
        """Return the lines that a host has printed in the current training, each as a dictionary."""
        lines = [json.loads(line) for line in list(self.ranks.lines[host]) if line.startswith("{")]
        begins = [i for i, line in enumerate(lines) if "ready" in line] + [len(lines)]
        return lines[begins[self.at] : begins[self.at + 1]] if self.at + 1 < len(begins) else []

    def steps(self, host):
        """Return the number of steps that a host has begun."""
        return sum("step" in line for line in self.said(host))

    def outcome(self, host):
        """Return the outcome of the training on a host; None if it has not ended."""
        return next((line for line in self.said(host) if "left" in line), None)

    def wait(self, truth):
        """Wait until something is true."""
        until = time.monotonic() + SOON
        while not truth():
            assert time.monotonic() < until, self.ranks.lines
            time.sleep(0.01)

    def next_is_under_way(self):
        """Go on to the next training, and wait until it is in its midst on all hosts."""
        self.at += 1
        self.wait(lambda: all(self.steps(host) > 4 for host in range(self.lab.hosts)))

    def wait_until_quiet(self):
        """Wait until host 0 has begun no step for a while."""
        seen, since = -1, 0.0
        while time.monotonic() < since + QUIET or seen < 0:
            if (steps := self.steps(0)) != seen:
                seen, since = steps, time.monotonic()
            time.sleep(0.01)
        assert self.outcome(0) is None  # it is quiet because it waits, and not because it is done

    def outcomes(self, hosts):
        """Wait for the training to end on these hosts and return the outcomes."""
        self.wait(lambda: all(self.outcome(host) is not None for host in hosts))
        return [self.outcome(host) for host in hosts]


def assert_one_sentence(outcome, begin, words, left=False):
    """That a training ended in one sentence, and that nothing of it is left, unless its store never answers again."""
    assert outcome["error"].startswith(begin) and words in outcome["error"], outcome
    assert "\n" not in outcome["error"] and (left or outcome["left"] == []), outcome


def test_a_link_that_is_cut_for_long_is_a_sentence_on_both_sides():
    """In time in one of three tries, the machine being shared; and once the link is back, nothing is left."""
    with Lab(2) as lab:
        at_work, late = Trainings(lab, [{"flows": 1, "timeout": TIMEOUT, "steps": 1000}] * 3), []
        for _ in range(3):
            at_work.next_is_under_way()
            lab.unplug(1)
            cut = time.monotonic()
            time.sleep(TIMEOUT + 2)
            lab.plug(1)
            here, there = at_work.outcomes([0, 1])
            assert_one_sentence(here, "PeerError: rank 1 is dead: no sign of it for", "rank 0 waits for it in")
            assert_one_sentence(there, *NO_ANSWER)
            late.append(max(here["at"], there["at"]) - cut)
            if late[-1] < TIMEOUT + 2:
                return
    raise AssertionError(f"sentences came {late} seconds after the link was cut")


def test_a_host_that_holds_the_store_and_stands_still_for_long_is_a_sentence_on_both_sides():
    with Lab(2) as lab:
        at_work = Trainings(lab, [{"flows": 3, "timeout": TIMEOUT, "steps": 1000}])
        at_work.next_is_under_way()
        with lab.stalled(0):
            time.sleep(TIMEOUT + 2)
        here, there = at_work.outcomes([0, 1])
    # Rank 1 is named if its last record comes before this rank, awake again, judges by those that it has.
    assert_one_sentence(here, "PeerError: ", "rank")
    assert_one_sentence(there, *NO_ANSWER)


def test_training_goes_on_after_a_moment_and_no_bit_is_another():
    """Undisturbed; with a link unplugged for a moment; with a host that stands still, over several flows."""
    flows = (1, 1, 3)
    with Lab(2) as lab:
        at_work = Trainings(lab, [{"flows": each, "timeout": PATIENT, "steps": 16} for each in flows])
        at_work.next_is_under_way()
        undisturbed = at_work.outcomes([0, 1])
        at_work.next_is_under_way()
        lab.unplug(1)
        at_work.wait_until_quiet()
        lab.plug(1)
        unplugged = at_work.outcomes([0, 1])
        at_work.next_is_under_way()
        with lab.stalled(1):
            at_work.wait_until_quiet()
        stalled = at_work.outcomes([0, 1])
    first = undisturbed[0]
    assert set(first) == {"weights", "left"} and first["left"] == []
    assert [*undisturbed, *unplugged, *stalled] == [first] * 6


@on_devices
def test_training_between_cities_goes_on_when_all_frames_have_waited_for_five_seconds(device):
    """No rank gives up before its time; the weights are those of a training on CPUs that was not disturbed."""
    training = {"flows": 1, "timeout": PATIENT, "steps": 16}
    with Lab(2, **FAR) as lab:
        at_work = Trainings(lab, [training, {**training, "device": device}])
        at_work.next_is_under_way()
        undisturbed = at_work.outcomes([0, 1])
        at_work.next_is_under_way()
        with lab.halted():
            time.sleep(5)
            assert at_work.outcome(0) is None
        assert at_work.outcomes([0, 1]) == undisturbed == [{"weights": undisturbed[0]["weights"], "left": []}] * 2


@on_devices
def test_a_way_between_cities_that_dies_is_a_sentence_on_both_sides(device):
    with Lab(2, **FAR) as lab:
        at_work = Trainings(lab, [{"flows": 1, "timeout": TIMEOUT, "steps": 1000, "device": device}])
        at_work.next_is_under_way()
        lab.cut()
        here, there = at_work.outcomes([0, 1])
    assert_one_sentence(here, "PeerError: rank 1 is dead: no sign of it for", "rank 0 waits for it in")
    assert_one_sentence(there, *NO_ANSWER, left=True)


@pytest.mark.parametrize("way", [{}, FAR], ids=["near", "far"])
@on_devices
def test_a_host_that_is_killed_is_a_sentence_on_the_other(way, device):
    with Lab(2, **way) as lab:
        at_work = Trainings(lab, [{"flows": 3, "timeout": TIMEOUT, "steps": 1000, "device": device}])
        at_work.next_is_under_way()
        at_work.ranks.processes[1].kill()
        (here,) = at_work.outcomes([0])
    assert_one_sentence(here, "PeerError: rank 1 is dead: no sign of it for", "rank 0 waits for it in")


def test_an_interface_that_is_not_there_is_named():
    """By torch, before there is anything to attach to: no host waits for another."""
    with Lab(2) as lab:
        ended = Trainings(lab, [], GLOO_SOCKET_IFNAME="nowhere").ranks.wait(SOON, keep_going=True)
    assert ended.statuses == (1, 1)
    assert all("nowhere" in output.splitlines()[-1] for output in ended.outputs), ended.outputs
