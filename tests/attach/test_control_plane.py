"""Failure detection with many ranks: a constant number of requests to the store, one judge, and no false alarm."""

import pytest
from crowd import Crowd
from tiers import slow_after

SIZES = slow_after(2, [8, 64, 512])


@pytest.mark.parametrize("size", SIZES)
def test_a_heartbeat_takes_two_requests_however_many_ranks_wait(size, monkeypatch):
    """Equal at 8, 64 and 512 ranks; the judge, who is one of them, makes one more."""
    crowd = Crowd(size, monkeypatch)
    assert crowd.requests() == [3] * size  # to arrive
    crowd.turn()
    assert crowd.requests() == [3] * size  # and to learn that all have
    for waiting in (False, True):
        if waiting:
            crowd.wait()
            crowd.turn()
            crowd.requests()
        for _ in range(3):
            crowd.pass_time()
            crowd.turn()
            assert crowd.judges() == [0] * waiting
            assert crowd.requests() == [3] * waiting + [2] * (size - waiting)


def test_one_of_those_who_wait_judges_for_all_until_none_waits(monkeypatch):
    crowd = Crowd(6, monkeypatch)
    crowd.wait(4, 5)
    crowd.turn()
    assert crowd.judges() == [4]
    crowd.flights[4].arrived = True
    for _ in range(5):
        crowd.pass_time()
        crowd.turn()
        assert crowd.judges() == [4]
    crowd.flights[5].arrived = True
    for _ in range(2):
        crowd.pass_time()
        crowd.turn()
    assert crowd.judges() == []


def silence_until_named(crowd, dead):
    """Let all ranks but one have heartbeats until all know whose fault it is; return the seconds that it took."""
    alive = [each for each in range(len(crowd.monitors)) if each != dead]
    began = crowd.now
    while not all(crowd.errors()[rank] for rank in alive):
        crowd.pass_time()
        crowd.turn(*(rank for rank in alive if crowd.monitors[rank].error is None))
    for rank in alive:
        assert crowd.errors()[rank].startswith(f"rank {dead} is dead: no sign of it for 6")
        assert crowd.errors()[rank] == crowd.errors()[alive[0]] and "waits for it in a flight" in crowd.errors()[rank]
    return crowd.now - began


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dead", [0, 3], ids=["judge", "another"])
def test_a_dead_rank_is_named_as_soon_with_many_ranks_even_if_it_is_the_judge(size, dead, monkeypatch):
    crowd = Crowd(size, monkeypatch)
    crowd.wait()
    crowd.turn()
    assert crowd.judges() == [0] and crowd.monitors[0].patience == 60.0
    assert silence_until_named(crowd, dead) in (61.0, 62.0)


def test_a_lease_that_is_not_renewed_goes_to_one_other_rank(monkeypatch):
    crowd = Crowd(5, monkeypatch)
    crowd.wait()
    crowd.turn()
    for _ in range(5):
        crowd.pass_time()
        crowd.turn(1, 2, 3, 4)
    assert crowd.judges()[1:] == [1]
    crowd.pass_time()
    crowd.turn()  # the former judge was only slow
    assert crowd.judges() == [1] and not any(crowd.errors())


def test_a_late_rank_has_the_judge_name_who_has_not_come(monkeypatch):
    crowd = Crowd(4, monkeypatch)
    crowd.wait(0, 1, launched=10.0)
    crowd.turn()
    crowd.wait(2, launched=601.0)
    crowd.turn()
    crowd.turn()
    said = (
        "rank 3 is late: it has not launched a flight within the timeout of 600 s; its latest launch known is nothing"
    )
    assert crowd.errors() == [said] * 3 + [""]  # rank 3 waits for nothing: it reads that when it comes


@pytest.mark.parametrize("slow", [0.01, 1.0, 20.0])
def test_no_store_is_so_slow_that_a_healthy_training_ends(slow, monkeypatch):
    """A request takes up to `slow` seconds, so that a heartbeat takes up to a minute: no rank is taken for dead."""
    crowd = Crowd(8, monkeypatch)
    crowd.wait()
    crowd.run(range(8), 600.0 + 100 * slow, lambda drawn: drawn.uniform(0, slow))
    assert crowd.errors() == [""] * 8


@pytest.mark.parametrize("slow", [0.01, 1.0])
def test_with_a_slow_store_too_a_dead_rank_is_named(slow, monkeypatch):
    crowd = Crowd(8, monkeypatch)
    crowd.wait()
    living = [0, 1, 2, 3, 4, 6, 7]
    crowd.run(range(8), 10.0, lambda drawn: drawn.uniform(0, slow))
    began = crowd.now
    crowd.run(living, 600.0, lambda drawn: drawn.uniform(0, slow), stop=lambda: any(crowd.errors()))
    assert 60.0 <= crowd.now - began <= (60 + 5) * (1 + 2 * slow)
    assert next(filter(None, crowd.errors())).startswith("rank 5 is dead: no sign of it for 6")
