"""A network that is cut: the part without the store never trains on as if it were all, and comes back afterwards."""

import sys
from pathlib import Path

import pytest
import torch
from crew import crew, gather, step

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from laboratory import needs_root

from bench.netlab import Lab

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
