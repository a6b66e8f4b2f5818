"""Ranks join, leave and are lost in a running training: no step is lost, and all go on from the same."""

import os
import signal

import pytest
import torch
from crew import Process, centre, crew, gather, step
from everything import ALGORITHMS, averages_gradients, made
from tiers import slow_after


def test_a_rank_that_joins_takes_weights_momentum_and_clock():
    with crew("gradient_allreduce()") as ranks:
        first = ranks.start("a")
        first[0].hear("attached")
        (before,) = step(first, 3)
        both = first + ranks.start("b", momentum=0.0)
        first[0].tell("gather", 2)
        came = both[1].hear("attached")
        both[1].tell("gather", 2)
        found = [each.hear("stepped") for each in both]
        assert came["step"] >= before["step"]
        assert came["passes"] == came["step"]  # buffers, too
        ended = step(both, 2)
        assert torch.equal(ended[0]["weights"], ended[1]["weights"])
        assert torch.equal(ended[0]["weights"], weights_after(ended[0]["present"], both))
        assert [change.before for change in found[0]["changes"]] == [change.before for change in came["changes"]]
        for each in both:
            each.tell("end")
        for each in both:
            each.hear("ended")  # and no hook has stayed


@pytest.mark.parametrize("way", [pytest.param("leave", marks=pytest.mark.slow), "SIGTERM"])
def test_a_rank_that_leaves_costs_no_step(way):
    with crew("gradient_allreduce()") as ranks:
        both = ranks.start("a", "b")
        gather(both)
        if way == "leave":
            both[1].tell("leave")
        else:
            os.kill(both[1].process.pid, signal.SIGTERM)
        both[1].tell("step", 1000)
        both[0].tell("gather", 1)
        found = both[0].hear("stepped")
        assert both[1].hear("left") is None
        both[1].process.join()
        assert both[1].process.exitcode == 0
        assert found["passes"] == found["step"]  # each forward counts
        assert torch.equal(found["weights"], weights_after(found["present"], both))
        assert "has left" in found["changes"][-1].why


@pytest.mark.slow
def test_a_rank_that_waits_for_others_leaves_when_it_is_asked_to():
    with crew("gradient_allreduce()", least=2) as ranks:
        both = ranks.start("a", "b")
        gather(both)
        both[1].kill()
        both[0].tell("step", 1)
        assert not both[0].end.poll(3.0)  # it waits
        os.kill(both[0].process.pid, signal.SIGTERM)
        assert both[0].hear("left") is None


@pytest.mark.slow
def test_fewer_than_the_least_wait():
    with crew("gradient_allreduce()", least=2) as ranks:
        both = ranks.start("a", "b")
        gather(both)
        both[1].kill()
        both[0].tell("step", 2)
        assert not both[0].end.poll(3.0)  # it makes no step alone
        new = both[:1] + ranks.start("c")
        new[1].hear("attached")
        new[1].tell("step", 2)
        found = [each.hear("stepped") for each in new]
        assert torch.equal(found[0]["weights"], found[1]["weights"])
        assert torch.equal(found[0]["weights"], weights_after(found[0]["present"], [*both, *new]))


FEW = ["bytegrad(MinMaxUInt8(block=64), error_feedback=True)"]


@pytest.mark.parametrize(
    "algorithm", [each if each in FEW else pytest.param(each, marks=pytest.mark.slow) for each in ALGORITHMS]
)
@pytest.mark.parametrize("other", ["cpu", pytest.param("late", marks=pytest.mark.slow)])
def test_every_algorithm_goes_on_with_fewer_and_with_more(algorithm, other):
    """So it does if ranks train on another device, `late_device`, beside one on a CPU."""
    with crew(algorithm, lr=0.05) as ranks:
        three = ranks.start("a") + ranks.start("b", "c", device=other)
        gather(three)
        three[2].tell("die", "flight")
        for each in three:
            each.tell("gather", 2)
        for each in three[:2]:
            each.hear("stepped")
        step(three[:2], 3)
        again = three[:2] + ranks.start("d", device=other)
        for each in again[:2]:
            each.tell("gather", 3)
        again[2].hear("attached")
        again[2].tell("gather", 3)
        for each in again:
            each.hear("stepped")
        found = step(again, 3)
        assert all(torch.isfinite(each["weights"]).all() for each in found)
        if averages_gradients(made(algorithm)):
            assert all(torch.equal(each["weights"], found[0]["weights"]) for each in found)


@pytest.mark.parametrize("algorithm", slow_after(0, ["async_push_sum()", "async_gossip()"]))
def test_edges_of_windows_follow_the_group(algorithm):
    """A rank that joins gets edges, one that is lost costs its own, and nobody raises, at whatever steps ranks are."""
    with crew(algorithm, lr=0.05) as ranks:
        here = ranks.start("a", "b")
        gather(here)
        step(here[:1], 9)  # ahead of the other
        for n, name in ((3, "c"), (4, "d")):
            for each in here:
                each.tell("gather", n)
            here += ranks.start(name)
            here[-1].hear("attached")
            here[-1].tell("gather", n)
            for each in here:
                each.hear("stepped")
            assert_edges(here)
        here.pop(1).kill()
        for each in here:
            each.tell("gather", 3)
        for each in here:
            each.hear("stepped")
        assert_edges(here)
        step(here[:1], 9)
        assert all(torch.isfinite(each["weights"]).all() for each in step(here, 3))


def assert_edges(processes: list[Process]) -> None:
    """Each rank has an edge to each neighbour in the ring, in the windows of all buckets, and none is lost."""
    n, found = len(processes), []
    for each in processes:
        each.tell("edges")
        found.append(each.hear("edges"))
    assert all(found)
    ring = sorted(sorted({(r - 1) % n, (r + 1) % n}) for r in range(n))
    for bucket in zip(*found, strict=True):
        assert sorted(edges for edges, _ in bucket) == ring
        assert not any(lost for _, lost in bucket)


SLOW = [pytest.param(moment, marks=pytest.mark.slow) for moment in ("now", "backward", "optimizer", "stepped")]


def weights_after(present: dict[int, list[int]], processes: list[Process], lr: float = 0.25) -> torch.Tensor:
    """The weights after steps in which these processes took part:  x ← x − γ mean_r (x − c_r)."""
    names = {each.process.pid: each.name for each in processes}
    x = torch.zeros_like(flat(centre("", 0)))
    for s in range(len(present)):
        x = x - lr * torch.stack([x - flat(centre(names[pid], s)) for pid in present[s]]).mean(0)
    return x


def flat(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("moment", ["flight", *SLOW])
def test_survivors_go_on_as_a_smaller_group(moment):
    """Wherever in its step a rank dies: every step is made whole, by those that were there, and by all of them."""
    with crew("gradient_allreduce()", least=1) as ranks:
        both = ranks.start("a", "b")
        gather(both)
        both[1].tell("die", moment)
        both[1].tell("step", 1)
        (found,) = step(both[:1], 4)
        assert found["ranks"] == 1
        assert torch.equal(found["weights"], weights_after(found["present"], both))
        assert found["passes"] == found["step"]  # that of the lost step was taken back
