"""When the monitor has given up, nothing that may rest on half a sum is stepped with or saved."""

from datetime import timedelta

import pytest
import torch
from blind import Done, Inline, Silent
from pool import ranks
from torch import nn
from training import loss, net_and_sgd

import baguakit as bk
from baguakit.flights.gradients import GradientRunner
from baguakit.flights.weights import WeightRunner
from baguakit.monitor.monitor import Fault, Monitor
from baguakit.runtime.runtime import Channel
from baguakit.testing.blind import Blind, Two


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "decentralized"])
def test_no_step_and_no_checkpoint_after_the_monitor_has_given_up(name):
    """On a GPU the host has passed the flights that an abort ends, and autograd raises nothing."""

    def run():
        model, optimizer = net_and_sgd()
        att = bk.attach(model, optimizer, getattr(bk.algorithms, name)())
        loss(model, 0, 0).backward()
        optimizer.step()
        loss(model, 0, 1).backward()
        att._life.runtime.monitor.fail("rank 7 is dead")
        weights, said = [p.detach().clone() for p in model.parameters()], []
        for call in (optimizer.step, att.state_dict):
            with pytest.raises(bk.PeerError, match="rank 7 is dead"):
                call()
            said.append(all(map(torch.equal, weights, model.parameters())))
        str(att.report())
        with pytest.raises(bk.PeerError):
            att.detach()
        return said

    assert ranks(2, run) == [[True, True]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_fault_changes_no_bit_until_it_is_set_and_is_nan_then(dtype):
    x = torch.tensor([0.0, -0.0, 1.5, torch.inf, -torch.inf, torch.finfo(dtype).tiny], dtype=dtype)
    before, fault, heads = x.clone(), Fault(), [x[i : i + 1] for i in range(len(x))]
    fault.multiply_(heads)
    assert torch.equal(x.view(torch.uint8), before.view(torch.uint8))
    fault.set()
    fault.multiply_(heads)
    assert x.isnan().all()


@pytest.mark.parametrize("delay", [0, 1])
def test_on_a_gpu_the_fault_lands_in_every_gradient_after_its_flight(delay):
    """The tensors hold no values: what reads one on the host raises."""
    with Blind():
        params = [nn.Parameter(torch.empty(n, device="cuda")) for n in (60, 0, 71)]
        halves = [nn.Parameter(torch.empty(9, device="cuda", dtype=torch.bfloat16))]
        rule = bk.during_backward(bk.stages.Mean(), delay=delay)
        monitor = Silent()
        channel = Channel(0, Inline(), Two(), monitor)
        runner = GradientRunner(0, rule, [bk.Bucket(params, 64), bk.Bucket(halves, 64)], channel)
        runner.make_states()
        shown, monitor.fault = [], Fault()
        multiply = monitor.fault.multiply_
        monitor.fault.multiply_ = lambda heads: shown.append([h.data_ptr() for h in heads]) or multiply(heads)
        for step in range(2):
            for p in [*params, *halves]:
                p.grad = torch.ones_like(p)
            for i in range(2):
                runner.launch_bucket(i, step, {*params, *halves}, None, None)
            runner.arrive_all()
            runner.land(None)
            assert shown == [[p.grad.data_ptr() for p in params if p.numel()], [halves[0].grad.data_ptr()]]
            shown.clear()


class Halved(Two):
    """The first of two ranks, whose all-reduces are ended half done."""

    def all_reduce(self, x, op=None):
        return x.mul_(0.25)


WEIGHTS = ["after_step(MEAN)", "after_step(MEAN, every=2, delay=1)", "between_steps(MEAN)", "free_running(MEAN)"]
WEIGHTS += ["after_step(MEAN, every=4, delay=1, mix=0.5)"]


def landed_weights(rule, fault, given_up=False, dtype=torch.float32, device="cpu"):
    """The weights that a flight of two buckets brings, and what they were."""
    params = [nn.Parameter(torch.full((n,), n / 8, dtype=dtype, device=device)) for n in (60, 0, 71)]
    rule = eval(rule.replace("MEAN", "bk.stages.Mean()"), {**vars(bk), "bk": bk})
    monitor = Silent()
    monitor.fault = fault
    buckets = [bk.Bucket(params[:2], 64), bk.Bucket(params[2:])]
    runner = WeightRunner(0, rule, buckets, Channel(0, Inline(), Halved(), monitor))
    runner.make_states()
    runner.launch_all(0, keep=rule.mix is None and (rule.delay > 0 or rule.window != "after_step"))
    with torch.no_grad():
        params[2].mul_(3)  # an optimizer step meanwhile
    before = [p.detach().clone() for p in params]
    if given_up:
        monitor.fault.set()
    runner.land_all()
    return [p.detach() for p in params], before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", WEIGHTS)
def test_on_a_gpu_weights_stay_as_they_were_where_an_abort_has_ended_their_flight(rule, dtype):
    plain, _ = landed_weights(rule, None, dtype=dtype)
    assert all(map(torch.equal, *landed_weights(rule, Fault(), True, dtype)))
    landed, before = landed_weights(rule, Fault(), dtype=dtype)
    assert all(map(torch.equal, landed, plain)) and not torch.equal(landed[0], before[0])


@pytest.mark.parametrize("rule", WEIGHTS[:1])
def test_on_a_gpu_the_host_waits_for_no_weights(rule):
    with Blind():
        landed_weights(rule, Fault(), device="cuda")


@pytest.mark.parametrize("device, hasty, size, cut_short", [
    ("cuda", False, 2, True), ("cpu", False, 2, False), ("cuda", True, 2, False), ("cuda", False, 1, False),
])  # fmt: skip
def test_a_flight_may_be_cut_short_on_a_gpu_between_ranks_that_do_not_come_and_go(device, hasty, size, cut_short):
    monitor = Monitor(None, 0, size, timedelta(seconds=9), abort=list)
    monitor.hasty = hasty
    monitor.fly_on(torch.device(device))
    assert (monitor.fault is not None) == cut_short
    monitor.fail("rank 1 is dead")
    assert monitor.fault is None or monitor.fault._is_set


def test_a_call_of_a_user_waits_for_the_device_and_raises_what_ended_it():
    """`merge()` may be followed by a checkpoint."""

    class OnDevice(Done):
        on_device, queries = True, 0

        def done(self):
            self.queries += 1
            return self.queries > 3

    class Late(Inline):
        def run(self, work, name=""):
            return OnDevice(super().run(work, name).result())

    monitor, flights = Silent(), []
    monitor.barrier = lambda number, launches: None
    monitor.wait_until = lambda there: flights.append([there() for _ in range(4)])
    for meet in (False, True):
        assert Channel(0, Late(), Two(), monitor).together("merge()", lambda comm: 7, meet) == 7
    assert flights == [[False, False, False, True]]
