"""200 ranks are killed at random moments: the others go on every time, and keep nothing of those that are gone."""

import random

import pytest
import torch
import torch.distributed as dist
from crew import INNER, crew, gather, step
from everything import averages_gradients, made
from tiers import slow_after

CASES, KILLS = 40, 5
MOMENTS = ["now", "backward", "flight", "optimizer", "stepped", *INNER, "joining"]
KINDS = [
    "gradient_allreduce()",
    "bytegrad(MinMaxUInt8(block=64), error_feedback=True)",
    "power_sgd(rank=1)",
    "decentralized(order='atc')",
    "decentralized(order='awc')",
    "choco(OnePeerExact(), gamma=1.0)",
    "local_sgd(every=2)",
    "diloco(every=3)",
    "async_model_average()",
    "decoupled_diloco(every=3, quorum=2)",
    "async_gossip()",
    "async_push_sum()",
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(CASES))
def test_all_go_on_whenever_a_rank_is_killed(seed):
    draws, algorithm = random.Random(seed), KINDS[seed % len(KINDS)]
    with crew(algorithm, lr=0.05) as ranks:
        here = ranks.start("a", "b", "c")
        gather(here)
        for kill in range(KILLS):
            here = replace(ranks, here, draws.choice(MOMENTS), draws, f"{kill}")
            found = step(here, 2)
            assert all(torch.isfinite(each["weights"]).all() for each in found)
            if averages_gradients(made(algorithm)):
                assert all(torch.equal(each["weights"], found[0]["weights"]) for each in found)
        step(here, 8)  # all neighbours have been sent to
        old, new = here[0], here[-1]  # it was never killed; it has seen no round but this one
        while resources(old) != resources(new):  # threads and connections end in their own time
            step(here)
        while not only_the_latest_two(rounds_in(ranks.address)):
            step(here)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", slow_after(0, ["local_sgd(every=2)", "gradient_allreduce()", "choco()"]))
def test_ranks_with_weights_go_on_too(algorithm):
    for weight in ("number", *(["function"] if algorithm != "choco()" else [])):
        with crew(algorithm, lr=0.05, weight=weight) as ranks:
            here = ranks.start("a", "b", "c")
            gather(here)
            for kill, moment in enumerate(("flight", "now")):
                here = replace(ranks, here, moment, random.Random(kill), f"{kill}")
                found = step(here, 2)
                assert all(torch.isfinite(each["weights"]).all() for each in found)
            if averages_gradients(made(algorithm)):
                assert all(torch.equal(each["weights"], found[0]["weights"]) for each in found)


def replace(ranks, here, moment, draws, name):
    """Kill one but the first, at a moment; return those that are there in the end."""
    one = draws.choice(here[1:])
    new = [f"{name} new"]
    if moment in ("meeting", "carrying"):  # it dies while they recover from the loss of another
        new.append(f"{name} too")
        left = here[:1]
    else:
        left = [each for each in here if each is not one]
    if moment == "joining":
        ranks.start(f"{name} dies", dies="carrying")
        one.kill()
    elif moment == "now":
        one.kill()
    else:
        one.tell("die", moment)
        one.tell(*(("state",) if moment == "saving" else ("step", 10**9)))
        for each in here:
            if each is not one and each not in left:
                each.kill()
    after = left + ranks.start(*new)
    for each in after:
        each.tell("together", {those.process.pid for those in after})
    for each in after:
        each.hear("stepped")
    return after


def rounds_in(address):
    """Return the numbers of the rounds of which the store holds a key."""
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    keys = [key.split("/")[0] for key in dist.PrefixStore("baguakit/elastic/baguakit", store).list_keys()]
    return {int(key) for key in keys if key.isdecimal()}


def only_the_latest_two(rounds):
    """Return whether rounds are the present one and the one before."""
    return rounds == {max(rounds) - 1, max(rounds)}


def resources(process):
    """Return what a process holds."""
    process.tell("resources")
    return process.hear("resources")
