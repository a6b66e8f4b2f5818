"""When the monitor has given up, nothing that may rest on half a sum is stepped with or saved."""

import pytest
import torch
from blind import Blind, Inline, Silent, Two
from pool import ranks
from torch import nn
from training import loss, net_and_sgd

import baguakit as bk
from baguakit.attach.monitor.fault import Fault
from baguakit.attach.runners.gradients import GradientRunner
from baguakit.attach.runtime.channels import Channel


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "decentralized"])
def test_no_step_and_no_checkpoint_after_the_monitor_has_given_up(name):
    """On a GPU the host has passed the flights that an abort ends, and autograd raises nothing."""

    def run():
        model, optimizer = net_and_sgd()
        att = bk.attach(model, optimizer, getattr(bk.algorithms, name)())
        loss(model, 0, 0).backward()
        optimizer.step()
        loss(model, 0, 1).backward()
        att._engine.runtime.monitor.fail("rank 7 is dead")
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


def test_a_fault_that_is_set_before_it_is_first_asked_for_is_nan():
    x, fault = torch.ones(2), Fault()
    fault.set()
    fault.multiply_([x])
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
        shown, monitor.fault, monitor.hasty = [], Fault(), False
        multiply = monitor.fault.multiply_
        monitor.fault.multiply_ = lambda heads: shown.append([h.data_ptr() for h in heads]) or multiply(heads)
        for step in range(2):
            for p in [*params, *halves]:
                p.grad = torch.ones_like(p)
            for i in range(2):
                runner.launch_bucket(i, step, {*params, *halves}, None, None)
            runner.arrive_all()
            runner.show_fault()
            runner.land(None)
            assert shown == [[p.grad.data_ptr() for p in params if p.numel()], [halves[0].grad.data_ptr()]]
            shown.clear()
        monitor.hasty = True  # the host has waited: the step counts
        runner.show_fault()
        assert not shown
