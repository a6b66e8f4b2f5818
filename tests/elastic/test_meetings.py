"""Meetings in the store: all that come agree on one round after the other. Processes are threads here."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

import baguakit as bk
from baguakit.elastic import rounds
from baguakit.elastic.rendezvous import (
    Member,
    Pause,
    Rendezvous,
    Round,
    Settings,
    delete_before,
    latest_round,
    members_of,
)
from baguakit.elastic.rounds import Rounds
from baguakit.monitor import PeerError

SOON = Settings("127.0.0.1", 0, "name", least=1, most=64, keep_alive=0.3, last_call=0.3, patience=20.0, every=1)


@pytest.fixture
def store():
    return dist.PrefixStore("test", dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))


def meet(store, names, settings=SOON, latest=0, seconds=20.0):
    """The rounds in which processes of these names find themselves, if they come together."""
    number, until = latest_round(store, 0) + 1, time.monotonic() + seconds

    def look():
        if time.monotonic() > until:
            raise TimeoutError

    def come(name):
        return Rendezvous(store.clone(), settings, Member(name, latest, 0), number).wait(look)

    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(come, names))


def names_of(members):
    return [member.name for member in members]


def round_of(store, number):
    return dist.PrefixStore(str(number), store)


def test_all_that_come_find_the_same_round(store):
    found = meet(store, "abcd", replace(SOON, least=4))
    assert sorted(names_of(found[0])) == list("abcd")
    assert found == [found[0]] * 4
    assert latest_round(store, 0) == 1


def test_those_of_the_round_before_keep_their_order_and_come_first(store):
    first = names_of(meet(store, "abc", replace(SOON, least=3))[0])
    round_of(store, 1).set("over", "")
    second = names_of(meet(store, "xcbay", replace(SOON, least=5))[0])
    assert second[:3] == first
    assert sorted(second[3:]) == ["x", "y"]


def test_a_member_that_does_not_answer_is_left_out(store):
    first = names_of(meet(store, "abc", replace(SOON, least=3))[0])
    round_of(store, 1).set("over", "")
    left = [name for name in first if name != "b"]
    assert names_of(meet(store, left)[0]) == left


def test_a_member_that_answers_is_waited_for_until_it_says_that_it_will_not_come(store):
    first = names_of(meet(store, "ab", replace(SOON, least=2))[0])
    here = round_of(store, 1)
    here.set("over", "")
    here.set("alive/1", "")
    waiting = threading.Thread(target=meet, args=(store, first[:1]))
    waiting.start()
    time.sleep(4 * SOON.keep_alive)
    assert not round_of(store, 2).check(["closed"])
    here.set("gone/1", "")
    waiting.join(20)
    assert names_of(members_of(round_of(store, 2))) == first[:1]


def test_no_more_than_the_most_are_let_in(store):
    found = meet(store, "abcd", replace(SOON, least=3, most=3))
    assert len(found[0]) == 3
    assert found == [found[0]] * 4


def test_too_few_wait_until_their_patience_ends(store):
    port = store.underlying_store.port
    with pytest.raises(TimeoutError, match=f"no group of at least 2 ranks has formed at 127.0.0.1:{port} within 1 s"):
        bk.elastic.join(f"127.0.0.1:{port}", least=2, patience=1.0)


def test_training_never_begins_anew_while_a_member_may_live(store):
    """Newcomers alone make no round, for as long as a member of the one before beats."""
    (old,) = meet(store, "a")
    assert names_of(old) == ["a"]
    here, over = round_of(store, 1), threading.Event()

    def beat():
        while not over.wait(0.1):
            here.add("beat/0", 1)

    beating = threading.Thread(target=beat)
    beating.start()
    with pytest.raises(TimeoutError):
        meet(store, "xy", seconds=2.0)
    over.set()
    beating.join()


def test_survivors_are_those_of_the_latest_round_with_a_whole_state():
    def survivors(*latest):
        return Round(9, None, 0, tuple(Member(str(i), each, 0) for i, each in enumerate(latest))).survivors()

    assert survivors(0, 0) == []
    assert survivors(7, 0, 7) == [0, 2]
    assert survivors(7, 8, 6) == [1]


@pytest.fixture
def two(store):
    """Two processes that have met, and 3 steps each."""
    settings = replace(SOON, port=store.underlying_store.port, least=2, most=2)
    both = [Trained(settings) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Rounds.meet, both))
    yield both
    for each in both:
        each.end_round(gone=True)


class Trained(Rounds):
    def step(self):
        return 3


def wait_until(true):
    """Wait for something that another thread does."""
    until = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_all_hear_of_the_first_plan_of_a_pause_and_of_the_end(two):
    two[1].pausing.ask(1, "first")
    two[0].pausing.ask(1, "second")  # which does not count
    wait_until(lambda: all(each.pausing.plan for each in two))
    assert [each.pausing.plan["why"] for each in two] == ["first", "first"]
    assert [each.pausing.due(3) for each in two] == [False, False]
    assert [each.pausing.due(4) for each in two] == [True, True]
    two[0].broken(two[0].round, "why")
    wait_until(lambda: two[1].why)
    assert [each.why for each in two] == ["why", "why"]
    with pytest.raises(PeerError, match="why"):
        two[1].during(lambda: None, None)


def test_news_of_a_round_that_is_over_ends_no_other(two):
    old = two[0].round
    two[0].broken(old, "first")
    wait_until(lambda: two[1].why)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Rounds.meet, two))
    assert two[0].round.number == old.number + 1
    two[0].broken(old, "late")
    assert [each.why for each in two] == ["", ""]
    assert not two[0].round.store.check(["broken"])


def test_the_rank_that_deletes_what_old_rounds_have_left_beats_meanwhile(store, monkeypatch):
    """It was taken for dead when that took long."""
    begun, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(rounds, "delete_before", lambda store, number: begun.set() or ended.wait(60))
    one = Trained(replace(SOON, port=store.underlying_store.port))
    one.meet()
    try:
        assert begun.wait(60)
        wait_until(lambda: one.round.store.add("beat/0", 0) >= 3)
    finally:
        ended.set()
        one.end_round(gone=True)


def test_old_rounds_leave_nothing_in_the_store(store):
    here = dist.PrefixStore("name", store)
    for key in ("1/closed", "1/group/x", "2/closed", "12/closed", "round"):
        here.set(key, "")
    store.set("1/of another", "")
    delete_before(here, 2)
    assert sorted(here.list_keys()) == ["12/closed", "2/closed", "round"]
    assert store.check(["1/of another"])


@pytest.mark.parametrize(("every", "until"), [(1, 6), (4, 8), (6, 6)])
def test_a_pause_is_after_a_step_that_nobody_has_ended(store, every, until):
    steps, here = [3, 5, 4], dist.PrefixStore("1", store)
    members = tuple(Member(str(i), 0, 0) for i in range(3))
    pauses = [Pause(Round(1, here, rank, members), lambda s=s: s) for rank, s in enumerate(steps)]
    for pause in pauses:
        assert not pause.due(100)  # nobody has asked for one
        pause.ask(every, "because")
        pause.heard()
    for pause, step in zip(pauses, steps, strict=True):
        assert [s for s in range(step, 12) if pause.due(s)] == list(range(until, 12))
        assert pause.plan["why"] == "because"
