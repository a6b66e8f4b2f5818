"""Conflicts with others that work on the same model: each is one sentence on every rank, and its advice works."""

import warnings

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from torch import nn
from training import flat, loss, net, net_and_sgd, run_steps, sgd

import baguakit as bk


def test_two_attachments_on_one_model():
    """In one window they would average twice. In two windows, or on other parameters, they work side by side."""

    def run():
        m, o = net_and_sgd()
        gradients, matrices = bk.algorithms.gradient_allreduce(), lambda name, p: p.ndim > 1
        with bk.attach(m, o, bk.algorithms.bytegrad()) as att:
            said = []
            for rule in (gradients, bk.free_running(bk.stages.Mean())):
                with pytest.raises(ValueError) as caught:
                    bk.attach(m, o, rule)
                said.append(str(caught.value))
            with pytest.raises(ValueError, match="another attachment acts on bias, and"):  # a part of it
                bk.attach(m[0], sgd(m[0].parameters()), gradients)
            with bk.attach(m, o, bk.algorithms.local_sgd(2)):
                loss(m, dist.get_rank(), 0).backward()
                o.step()
            att.detach()
            with bk.attach(m, o, gradients):
                pass
        with (
            bk.attach(m, o, bk.during_backward(bk.stages.Mean(), where=matrices)),
            bk.attach(m, o, bk.during_backward(bk.stages.Mean(), where=lambda name, p: not matrices(name, p))) as rest,
        ):
            run_steps(m, o, range(3))
            return said, rest.consensus_distance()

    sentence = (
        "during_backward(CompressedMean(MinMaxUInt8())) of another attachment acts on 0.bias, and {} would, too; "
        "call detach() on that one, or give all rules to one attach"
    )
    for said, apart in ranks(2, run):
        assert said == [sentence.format("during_backward(Mean())"), sentence.format("free_running(Mean())")]
        assert apart == 0.0


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_in_ddp(inside):
    """It stands aside, and rules act on it as on any model."""

    def run():
        m = nn.parallel.DistributedDataParallel(net())
        m = nn.ModuleDict({"net": m}) if inside else m
        o = sgd(m.parameters())
        with bk.attach(m, o, bk.algorithms.bytegrad()), bk.attach(m, o, bk.algorithms.local_sgd(2)):
            for step in range(2):
                o.zero_grad()
                loss(m["net"] if inside else m, dist.get_rank(), step).backward()
                o.step()
        return flat(m)

    one, other = ranks(2, run)
    assert torch.equal(one, other)


def test_fsdp_of_old():
    def run():
        from torch.distributed.fsdp import FullyShardedDataParallel

        m = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
        with pytest.raises(TypeError, match=r"use fully_shard\(module\)"):
            bk.attach(m, sgd(m.parameters()), bk.algorithms.local_sgd())

    def quietly():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()

    ranks(2, quietly)


def test_an_optimizer_of_other_tensors():
    """Nobody would average what it steps: the head of another module, or weights before they were replaced."""

    def run():
        m, head = net(), nn.Linear(1, 3)
        both = torch.optim.AdamW([*m.parameters(), *head.parameters()])
        said = []
        for rule in (bk.algorithms.gradient_allreduce(), bk.algorithms.local_sgd()):
            with pytest.raises(ValueError) as caught:
                bk.attach(m, both, rule)
            said.append(str(caught.value))
        with bk.attach(nn.ModuleList([m, head]), both, bk.algorithms.gradient_allreduce()):
            return said

    for said in ranks(2, run):
        assert set(said) == {
            "AdamW steps a tensor (3, 1) in group 0 that is no parameter of the model, a Sequential; attach an "
            "nn.ModuleList of all that it steps, or, where it steps copies of the weights in fp32, give rules on "
            "gradients and None for the optimizer"
        }
