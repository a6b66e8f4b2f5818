"""Mishaps: two die at once, one dies while it joins or attaches something else, the store goes."""

import os
import signal

import pytest
import torch
from crew import crew, gather, step


@pytest.mark.slow
def test_a_rank_that_is_lost_in_a_callback_ends_no_other():
    """One that has just joined runs its callbacks as it registers them: it goes on with those that are left."""
    with crew("gradient_allreduce()", gathers=True) as ranks:
        both = ranks.start("a") + ranks.start("b", dies_told=3)
        gather(both)
        left = both[:1] + ranks.start("c")
        both[1].tell("step", 10**9)
        for each in left:
            each.tell("together", {those.process.pid for those in left})
        for each in left:
            assert each.hear("stepped")["ranks"] == 2
        found = step(left)
        assert torch.equal(found[0]["weights"], found[1]["weights"])
        assert {change.ranks for change in found[1]["changes"]} == {3, 2}


@pytest.mark.slow
def test_a_rank_that_attaches_something_else_is_refused_and_the_others_go_on():
    with crew("gradient_allreduce()") as ranks:
        both = ranks.start("a", "b")
        gather(both)
        other = ranks.start("c", algorithm="bytegrad()")
        for each in both:
            each.tell("gather", 3)
        kind, words = other[0].hear("raised")
        assert kind == "ValueError"
        assert words.startswith("ranks must attach the same: ")
        third = ranks.start("d")
        third[0].hear("attached")
        third[0].tell("gather", 3)
        found = [each.hear("stepped") for each in (*both, *third)]
        assert {each["ranks"] for each in found} == {3}


@pytest.mark.slow
def test_a_collective_of_the_program_ends_when_a_rank_is_lost():
    """One with which there never was a connection, and which no flight of the attachment waits for."""
    with crew("gradient_allreduce()", keep_alive=0.2) as ranks:
        both = ranks.start("a", "b")
        gather(both)
        both[0].tell("collective")
        both[1].kill()
        assert both[0].hear("stepped")["ranks"] == 1
        both[0].tell("collective")
        assert both[0].hear("stepped")["ranks"] == 1


@pytest.mark.slow
def test_without_the_store_nobody_trains_on():
    with crew("gradient_allreduce()", patience=2.0) as ranks:
        both = ranks.start("a", "b")
        gather(both)
        ranks.store.kill()
        for each in both:
            each.tell("step", 10**9)
        for each in both:
            kind, words = each.hear("raised")
            assert kind == "TimeoutError"
            assert words.startswith(f"the store at {ranks.address} cannot be reached: ")


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_left_out_and_joins_again():
    with crew("gradient_allreduce()", timeout=2.0) as ranks:
        both = ranks.start("a", "b")
        gather(both)
        os.kill(both[1].process.pid, signal.SIGSTOP)
        both[1].tell("step", 1)
        both[0].tell("gather", 1)
        assert both[0].hear("stepped")["ranks"] == 1
        os.kill(both[1].process.pid, signal.SIGCONT)
        both[0].tell("gather", 2)
        assert both[0].hear("stepped")["ranks"] == 2
        both[1].hear("stepped")
        found = step(both, 1)
        assert torch.equal(found[0]["weights"], found[1]["weights"])


@pytest.mark.slow
def test_a_mean_of_residuals_is_that_of_those_that_are_left():
    """After the last whole step, on every one of them: what the mean has still to bring does not change."""
    with crew("bytegrad(UInt4(block=64), error_feedback=True)") as ranks:
        three = ranks.start("a", "b", "c")
        gather(three)
        step(three, 3)
        before = [state_of(each) for each in three[:2]]
        three[2].kill()
        for each in three[:2]:
            each.tell("gather", 2)
        for each in three[:2]:
            each.hear("stepped")
        assert before[0]
        for each in three[:2]:
            after = state_of(each)
            for name, mine in before[0].items():
                assert torch.equal(after[name], (mine + before[1][name]) / 2)


def state_of(process):
    """The residuals of a process, by parameter."""
    process.tell("state")
    saved = process.hear("state")["rules"]["0"]["parameters"]
    return {name: held["residual"] for name, held in saved.items() if "residual" in held}
