"""A network that is cut: the part without the store never trains on as if it were all, and comes back afterwards."""

import sys
from pathlib import Path

import pytest
import torch
from crew import crew, gather, step

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from laboratory import needs_root

from bench.netlab import Lab
from bench.netlab.commands import batch

STORE = 3  # the host of the store


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("algorithm", ["gradient_allreduce()", "decentralized()"])
def test_the_part_without_the_store_waits_and_comes_back(algorithm):
    with Lab(STORE + 1) as lab:
        address = lab.wires.address(STORE)
        with crew(algorithm, address, lab.namespace(STORE), timeout=3.0) as ranks:
            three = [ranks.start(name, namespace=lab.namespace(host))[0] for host, name in enumerate("abc")]
            gather(three)
            step(three, 2)
            lab.unplug(2)
            three[2].tell("return", 3)
            with_store = three[:2]
            for each in with_store:
                each.tell("gather", 2)
            found = [each.hear("stepped") for each in with_store]
            assert {each["ranks"] for each in found} == {2}
            step(with_store, 5)
            lab.plug(2)
            for each in with_store:
                each.tell("gather", 3)
            found = [each.hear("stepped") for each in three]
            assert {each["ranks"] for each in found} == {3}
            assert {len(members) for members in found[2]["present"].values()} == {3}  # it never trained with fewer
            for each in three:
                each.tell("collective")  # between the hosts, by the program
            assert [each.hear("stepped")["ranks"] for each in three] == [3] * 3
            last = step(three)
            if algorithm == "gradient_allreduce()":
                assert all(torch.equal(each["weights"], last[0]["weights"]) for each in last)


def in_order(three):
    """Return processes by rank, when all are in one group."""
    found = gather(three)
    return [
        each for _, each in sorted(zip([said["rank"] for said in found], three, strict=True), key=lambda pair: pair[0])
    ]


def go_on_without(lost, left):
    """Let those that are left make steps without one that is lost, and check what they are told."""
    for each in left:
        each.tell("gather", len(left))
    found = [each.hear("stepped") for each in left]
    for said in found:
        change = said["changes"][-1]
        assert [name.split(":")[1] for name in change.lost] == [str(lost.process.pid)]
        assert f":{lost.process.pid}:" in change.why
        assert "is left out: it and " in change.why
    assert torch.equal(found[0]["weights"], found[1]["weights"])


@pytest.mark.slow
def test_one_of_two_that_cannot_reach_each_other_is_left_out_and_the_rest_train():
    with crew("gradient_allreduce()", patience=4.0) as ranks:
        first, second, last = in_order(ranks.start("a", "b", "c"))
        second.tell("cut", last.process.pid)
        last.tell("cut", second.process.pid)
        last.tell("gather", 2)
        go_on_without(last, [first, second])
        kind, words = last.hear("raised")
        assert kind == "TimeoutError"
        assert "is left out: within 4 s it could not reach " in words
        assert f":{second.process.pid}:" in words


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_who_was_left_out_for_a_broken_link_comes_back_when_it_is_whole():
    with Lab(STORE + 1) as lab:
        address = lab.wires.address(STORE)
        with crew("gradient_allreduce()", address, lab.namespace(STORE), timeout=3.0, patience=12.0) as ranks:
            hosts = {name: host for host, name in enumerate("abc")}
            three = in_order([ranks.start(name, namespace=lab.namespace(host))[0] for name, host in hosts.items()])
            pair = [hosts[each.name] for each in three[1:]]
            for here, there in (pair, pair[::-1]):
                batch("ip", lab.namespace(here).name, [f"route add blackhole {lab.wires.address(there)}/32"])
            three[2].tell("return", 3)
            go_on_without(three[2], three[:2])
            for here, there in (pair, pair[::-1]):
                batch("ip", lab.namespace(here).name, [f"route del blackhole {lab.wires.address(there)}/32"])
            for each in three[:2]:
                each.tell("gather", 3)
            assert [each.hear("stepped")["ranks"] for each in three] == [3] * 3
