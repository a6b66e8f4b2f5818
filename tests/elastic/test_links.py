"""Meetings of processes of which some do not reach each other, or have other settings. Processes are threads here."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
import torch.distributed as dist
from test_meetings import SOON, meet, names_of, round_of

from baguakit.elastic.doors import OPEN, SILENT
from baguakit.elastic.membership import GLOO
from baguakit.elastic.rendezvous import Member, Rendezvous, unbroken


@pytest.fixture
def store():
    return dist.PrefixStore("test", dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))


def test_settings_that_differ_are_refused(store):
    beating = round_of(store, 1)
    meet(store, "a")
    beating.set("closed", json.dumps([asdict(Member("a", 0, 0, agreed=SOON.agreed))]))
    for name, settings in (("b", replace(SOON, least=2)), ("c", replace(SOON, every=7))):
        beating.add("beat/0", 1)
        mine = Member(name, 0, 0, agreed=settings.agreed)
        with pytest.raises(
            ValueError, match=f"{name} joins with {settings.agreed}, and a has joined with {SOON.agreed}"
        ):
            Rendezvous(store, settings, mine, 2).wait(lambda: None)


@pytest.mark.parametrize(
    ("broken", "kept"),
    [
        ({}, "abcd"),
        ({"b": "cd"}, "acd"),  # who has the fewest links
        ({"c": "b", "d": "b"}, "acd"),
        ({"a": "b", "b": "a"}, "acd"),  # a tie
        ({"a": "cd", "b": "cd"}, "ab"),
        ({"a": "bcd", "b": "cd", "c": "d"}, "a"),
    ],
)
def test_who_reaches_the_fewest_is_left_out(broken, kept):
    found = unbroken(
        [Member(name, 0, 0, cut=list(broken.get(name, ""))) for name in "abcd"],
        {name: i for i, name in enumerate("abcd")},
    )
    assert "".join(names_of(found)) == kept


class Cut:
    """Doors, of which those in `silent` do not answer."""

    def __init__(self, silent):
        self.silent = silent

    def knock(self, address):
        return SILENT if address in self.silent else OPEN

    def end(self):
        pass


def test_without_a_step_for_the_patience_one_of_a_broken_link_is_left_out(store):
    order = names_of(meet(store, "abc", replace(SOON, least=3))[0])
    round_of(store, 1).set("over", "")

    def come(name):
        meeting = Rendezvous(store.clone(), SOON, Member(name, 1, 0, door=name), 2, lambda: True)
        meeting._knocks = Cut({order[1]: order[2], order[2]: order[1]}.get(name, ""))
        return meeting.wait(lambda: None)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(come, order))
    assert names_of(found[0]) == order[:2]
    assert found == [found[0]] * 3
    said = f"{order[2]} is left out: it and {order[1]} do not reach each other"
    assert round_of(store, 2).get("cut").decode() == said


def test_a_newcomer_comes_when_it_reaches_all(store):
    meet(store, "a")
    here, looks = round_of(store, 1), []
    here.set("closed", json.dumps([asdict(Member("a", 0, 0, door="a"))]))
    meeting = Rendezvous(store, SOON, Member("b", 0, 0), 2)
    meeting._knocks = Cut("a")

    def look():
        here.add("beat/0", 1)
        looks.append(store.check(["2/came"]))
        if len(looks) == 5:
            assert meeting.cut_off == "a"
            here.set("over", "")
            meeting._knocks.silent = ""
        if any(looks):
            raise TimeoutError

    with pytest.raises(TimeoutError):
        meeting.wait(look)
    assert not any(looks[:5])


@pytest.mark.parametrize(
    ("text", "is_gloos"),
    [
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1", True),
        ("Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] no error", True),
        ("cannot write gloo.txt", False),
        ("the igloo is full", False),
    ],
)
def test_only_errors_of_gloo_are_taken_for_lost_ranks(text, is_gloos):
    assert bool(GLOO.match(text)) == is_gloos
