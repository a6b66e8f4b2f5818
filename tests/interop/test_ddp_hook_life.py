"""A stage in DDP's hook in the course of time: what it remembers, its checkpoints, its errors and its end."""

import gc
import time

import pytest
import torch
import torch.distributed as dist
from hooking import BLOCKS, SMALL, come_and_gone, compressed, feedback, hooked
from pool import ranks
from torch import nn
from training import flat, loss, net, net_and_sgd, run_steps, sgd

import baguakit as bk

RULES = {
    "feedback": feedback,
    "bytegrad": lambda bk: bk.algorithms.bytegrad(error_feedback=True),
    "qadam": lambda bk: bk.algorithms.qadam(3, compressor=bk.compressors.MinMaxUInt8(block=BLOCKS)),
    "top_k": lambda bk: bk.algorithms.top_k(0.1),
    "power_sgd": lambda bk: bk.algorithms.power_sgd(rank=1, warmup_steps=2),
}
FAST = ("feedback", "power_sgd")


@pytest.mark.parametrize("rule", RULES)
def test_replicas_are_equal_and_the_residuals_follow_the_parameters(rule):
    """DDP cuts its buckets anew after the first backward: no residual is lost, and every rank ends with the same."""

    def run():
        module = net()
        ddp = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=SMALL)
        optimizer = sgd(module.parameters())
        cuts, residuals = [], []
        with bk.interop.ddp(ddp, RULES[rule](bk)) as handle:
            for step in range(5):
                optimizer.zero_grad()
                loss(ddp, dist.get_rank(), step).backward()
                optimizer.step()
                saved = handle.state_dict()
                assert handle.step == saved["step"] == step + 1
                routes = list(saved["rules"].values())
                cuts.append(routes[-1]["cut"])
                residuals.append({name for name, held in routes[-1]["parameters"].items() if held})
        return flat(module), cuts, residuals

    results = ranks(3, run)
    assert all(torch.equal(results[0][0], weights) for weights, _, _ in results)
    for _, cuts, residuals in results:
        assert [len(cut) for cut in cuts] == ([0, 0, 2, 2, 2] if rule == "power_sgd" else [1, 2, 2, 2, 2])
        assert residuals[-1] == dict(net().named_parameters()).keys()


@pytest.mark.parametrize("rule", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in RULES])
def test_a_resumed_run_is_the_uninterrupted_one(rule):
    """Resumed in a new DDP, whose first buckets are others: those are a part of the run, so compare like with like."""

    def whole():
        module, saved = net(), None
        optimizer = sgd(module.parameters())
        for begin, end in ((0, 4), (4, 8)):
            ddp = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1e-6 if rule != "power_sgd" else 25)
            with bk.interop.ddp(ddp, RULES[rule](bk)) as handle:
                if saved is not None:
                    handle.load_state_dict(saved)
                run_steps(ddp, optimizer, range(begin, end))
                saved = handle.state_dict()
        return flat(module)

    def parts():
        options = {"bucket_cap_mb": 1e-6 if rule != "power_sgd" else 25}
        _, saved = hooked(RULES[rule], steps=4, **options)
        return hooked(RULES[rule], begin=4, saved=saved, **options)[0]

    assert all(torch.equal(a, b) for a, b in zip(ranks(2, whole), ranks(2, parts), strict=True))


def test_a_residual_is_what_was_lost_across_the_new_cut():
    """Σ_t result_t = Σ_t mean(g_t) − mean(e_T): what the first cut's residual held is in the second's flights."""

    def run():
        comm = bk.Comm()
        module, exact = net(), net()
        ddp = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=SMALL)
        total, owed = 0, 0
        with bk.interop.ddp(ddp, feedback(bk)) as handle:
            for step in range(4):
                ddp.zero_grad()
                exact.zero_grad()
                loss(ddp, dist.get_rank(), step).backward()
                loss(exact, dist.get_rank(), step).backward()
                total = total + torch.cat([p.grad.flatten().double() for p in module.parameters()])
                owed = owed + torch.cat([p.grad.flatten().double() for p in exact.parameters()])
            parameters = handle.state_dict()["rules"]["0"]["parameters"]
            left = torch.cat([parameters[name]["residual"].flatten().double() for name, _ in net().named_parameters()])
        return total, bk.primitives.mean_(owed - left, comm), left.norm()

    for total, owed, left in ranks(2, run):
        assert left > 0
        torch.testing.assert_close(total, owed, rtol=0, atol=1e-5)


def test_a_checkpoint_of_attach_is_one_of_ddp():
    def run():
        module, optimizer = net_and_sgd()
        with bk.attach(module, optimizer, bk.during_backward(feedback(bk))) as att:
            loss(module, dist.get_rank(), 0).backward()
            optimizer.step()
            first = att.state_dict()
        ddp = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=SMALL)
        with bk.interop.ddp(ddp, feedback(bk)) as handle:
            handle.load_state_dict(first)
            return first, handle.state_dict()

    for first, second in ranks(2, run):
        assert second["step"] == first["step"] == 1
        ours, theirs = (state["rules"]["0"]["parameters"] for state in (first, second))
        assert all(torch.equal(ours[name]["residual"], theirs[name]["residual"]) for name in ours)
        assert any(held["residual"].any() for held in ours.values())


def test_detach_gives_ddp_back_and_another_stage_may_come():
    def run():
        ddp = nn.parallel.DistributedDataParallel(net())
        theirs = nn.parallel.DistributedDataParallel(net())
        enumerate_threads = __import__("threading").enumerate
        threads = {*enumerate_threads()}  # one of an earlier test may end meanwhile
        come_and_gone(bk.interop.ddp, ddp, bk)
        gc.collect()
        for thread in {*enumerate_threads()} - threads:
            thread.join(60)
        assert {*enumerate_threads()} <= threads
        for step in range(3):
            for each in (ddp, theirs):
                each.zero_grad()
                loss(each, dist.get_rank(), step).backward()
            for p, q in zip(ddp.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-6)
        return True

    assert all(ranks(2, run))


@pytest.mark.parametrize("static_graph", [False, True])
def test_an_error_in_a_flight_is_the_exception_of_backward(static_graph):
    def run():
        class Broken(bk.stages.Mean):
            def __call__(self, x, state, comm):
                raise ArithmeticError("the stage is broken")

        ddp = nn.parallel.DistributedDataParallel(net(), static_graph=static_graph, bucket_cap_mb=SMALL)
        began = time.monotonic()
        with pytest.raises(Exception, match="the stage is broken") as caught, bk.interop.ddp(ddp, Broken(), timeout=5):
            loss(ddp, dist.get_rank(), 0).backward()
        return time.monotonic() - began, str(caught.value)

    for seconds, said in ranks(2, run):
        assert seconds < 20 and "\n" not in said


REFUSED = {
    "a bare module": (lambda bk, m: bk.interop.ddp(m.module, bk.stages.Mean()), "use bk.attach for others"),
    "no stage": (lambda bk, m: bk.interop.ddp(m, "mean"), "a stage such as Mean"),
    "nothing": (lambda bk, m: bk.interop.ddp(m, ()), "a stage such as Mean"),
    "a rule on weights": (lambda bk, m: bk.interop.ddp(m, bk.algorithms.local_sgd()), "acts on weights"),
    "some parameters": (
        lambda bk, m: bk.interop.ddp(m, bk.during_backward(bk.stages.Mean(), where=lambda name, p: True)),
        "acts on some parameters",
    ),
    "two at a time": (
        lambda bk, m: bk.interop.ddp(m, (bk.algorithms.bytegrad(), bk.algorithms.gradient_allreduce())),
        "act in the same steps",
    ),
    "no nodes": (lambda bk, m: bk.interop.ddp(m, bk.hierarchical(bk.algorithms.bytegrad())), "must know the nodes"),
    "no comm": (lambda bk, m: bk.interop.ddp(m, bk.stages.Mean(), "world"), "a bk.Comm, not 'world'"),
    "different stages": (
        lambda bk, m: bk.interop.ddp(m, [bk.stages.Mean(), compressed(bk)][torch.distributed.get_rank()]),
        "rank 0 has during_backward.Mean.* where rank 1 has during_backward.CompressedMean",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_in_words(case):
    make, words = REFUSED[case]

    def run():
        ddp = nn.parallel.DistributedDataParallel(net())
        with pytest.raises((TypeError, ValueError), match=words) as caught:
            make(bk, ddp)
        assert bk.Comm().gather_objects(1) == [1, 1]
        return str(caught.value)

    assert not any("\n" in said for said in ranks(2, run))
