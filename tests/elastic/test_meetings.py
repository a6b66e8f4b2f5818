"""Meetings in the store: all that come agree on one round after the other. Processes are threads here."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

from baguakit.elastic.bells import BROKEN, PAUSE, Bells
from baguakit.elastic.meeting import Meeting, Member, Round, Settings, latest_round, members_of
from baguakit.elastic.pausing import Pause

SOON = Settings("127.0.0.1", 0, "name", least=1, most=64, keep_alive=0.3, last_call=0.3, patience=20.0)


@pytest.fixture
def store():
    return dist.PrefixStore("test", dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))


def meet(store, names, settings=SOON, latest=0, seconds=20.0):
    """The rounds in which processes of these names find themselves, if they come together."""
    number = latest_round(store, 0) + 1

    def come(name):
        return Meeting(store.clone(), settings, Member(name, latest, 0), number).wait(time.monotonic() + seconds)

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
    with pytest.raises(TimeoutError, match="no group of at least 2 ranks has formed"):
        meet(store, "a", replace(SOON, least=2), seconds=0.5)


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


def heard(store, rank, size, ring):
    """Return the kinds and words that the bells of a rank say after `ring(bells)`."""
    said, done = [], threading.Event()

    def hear(round, kind, words):
        said.append((kind, words))
        if kind == BROKEN:
            done.set()

    bells = Bells(Round(1, store, rank, tuple(Member(str(i), 0, 0) for i in range(size))), hear)
    ring(bells)
    assert done.wait(20)
    bells.end()
    return said


def test_bells_ring_for_a_pause_and_then_for_the_end(store):
    def ring(bells):
        bells.pause("first")
        bells.pause("second")  # which does not count
        Bells.broken_by(bells.round, "why")

    assert heard(dist.PrefixStore("1", store), 1, 2, ring) in ([(PAUSE, "first"), (BROKEN, "why")], [(BROKEN, "why")])


@pytest.mark.parametrize(("every", "until"), [(1, 6), (4, 8), (6, 6)])
def test_a_pause_is_after_a_step_that_nobody_has_ended(store, every, until):
    steps, here = [3, 5, 4], dist.PrefixStore("1", store)
    members = tuple(Member(str(i), 0, 0) for i in range(3))
    pauses = [Pause(Round(1, here, rank, members), lambda s=s: s) for rank, s in enumerate(steps)]
    for pause in pauses:
        assert not pause.due(100)  # nobody has asked for one
        pause.plan({"every": every, "why": "because"})
    for pause, step in zip(pauses, steps, strict=True):
        assert [s for s in range(step, 12) if pause.due(s)] == list(range(until, 12))
        assert pause.why == "because"
