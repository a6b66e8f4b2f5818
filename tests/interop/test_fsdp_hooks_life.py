"""A stage in FSDP2's hooks in the course of time: its beginning, its checkpoints, its errors and its end."""

import pytest
import torch
import torch.distributed as dist
from hooking import come_and_gone, compressed, feedback
from pool import ranks
from sharding import full, grid, line, sharded
from tiers import slow_after
from torch import nn
from torch.distributed.fsdp import fully_shard
from training import flat, loss, net, run_steps, sgd

import baguakit as bk


@pytest.mark.parametrize("way", slow_after(1, ["across", "within"]))
def test_a_resumed_run_is_the_uninterrupted_one(way):
    def run(stops):
        mesh = grid() if way == "across" else line()
        comm = bk.Comm(mesh.get_group("inter")) if way == "across" else None
        module = sharded(mesh["intra"])
        optimizer = sgd(module.parameters())
        saved = None
        for begin, end in zip((0, *stops), (*stops, 6), strict=True):
            with bk.interop.fsdp(module, feedback(bk), comm, broadcast=False) as handle:
                if saved is not None:
                    handle.load_state_dict(saved)
                run_steps(module, optimizer, range(begin, end))
                saved = handle.state_dict()
        return full(module), saved["step"]

    n = 4 if way == "across" else 2
    for (whole, _), (parts, step) in zip(ranks(n, run, ()), ranks(n, run, (2, 3)), strict=True):
        assert torch.equal(whole, parts) and step == 6


def test_replicas_begin_as_the_first():
    def run():
        mesh = grid()
        module = net()
        with torch.no_grad():
            for p in module.parameters():
                p.add_(dist.get_rank() // 2)
        module = sharded(mesh["intra"], module)
        with bk.interop.fsdp(module, bk.stages.Mean(), bk.Comm(mesh.get_group("inter"))):
            return full(module)

    assert all(torch.equal(weights, flat(net())) for weights in ranks(4, run))


def test_detach_gives_fsdp_back():
    def run():
        module, other = sharded(line()), sharded(line())
        come_and_gone(bk.interop.fsdp, module, bk)
        for each in (module, other):
            each.zero_grad()
            loss(each, dist.get_rank(), 1).backward()
        return [
            torch.equal(p.grad.full_tensor(), q.grad.full_tensor())
            for p, q in zip(module.parameters(), other.parameters(), strict=True)
        ]

    assert all(all(equal) for equal in ranks(2, run))


def test_an_overflow_is_passed_on_and_never_kept():
    def run():
        module = sharded(line())
        finite = []
        with bk.interop.fsdp(module, feedback(bk)) as handle:
            for step in range(3):
                module.zero_grad()
                bad = float("inf") if step == 1 and dist.get_rank() == 1 else 1.0
                (loss(module, dist.get_rank(), step) * bad).backward()
                finite.append(all(bool(p.grad.full_tensor().isfinite().all()) for p in module.parameters()))
            saved = handle.state_dict()["rules"]["0"]["parameters"]
        return finite, all(bool(held["residual"].isfinite().all()) for held in saved.values())

    for finite, kept in ranks(2, run):
        assert finite == [True, False, True] and kept


def native(bk):
    """A model that FSDP replicates itself."""
    mesh = grid()
    return bk.interop.fsdp(fully_shard(net(), mesh=mesh), bk.stages.Mean(), bk.Comm(mesh.get_group("inter")))


REFUSED = {
    "nothing sharded": (lambda bk: bk.interop.fsdp(net(), bk.stages.Mean()), "fully_shard"),
    "shards of the same": (
        lambda bk: bk.interop.fsdp(sharded(grid()["intra"]), bk.stages.Mean(), bk.Comm()),
        "hold shards of the same parameters",
    ),
    "replicated by FSDP": (native, "FSDP averages over the first itself"),
    "no half": (lambda bk: bk.interop.fsdp(sharded(line()), bk.algorithms.top_k(0.1)), "only its own shard"),
    "a rule on weights": (lambda bk: bk.interop.fsdp(sharded(line()), bk.algorithms.local_sgd()), "acts on weights"),
    "compressed weights across": (
        lambda bk: (
            (mesh := grid())
            and bk.interop.fsdp(
                sharded(mesh["intra"]),
                bk.stages.Mean(),
                bk.Comm(mesh.get_group("inter")),
                weights=bk.compressors.MinMaxUInt8(),
            )
        ),
        "only without comm=",
    ),
    "attach, on gradients": (
        lambda bk: bk.attach(m := sharded(line()), sgd(m.parameters()), bk.algorithms.bytegrad()),
        "use bk.interop.fsdp",
    ),
    "attach, over the shards": (
        lambda bk: bk.attach(m := sharded(line()), sgd(m.parameters()), bk.algorithms.local_sgd()),
        "hold shards of the same",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_in_words(case):
    make, words = REFUSED[case]

    def run():
        with pytest.raises((TypeError, ValueError), match=words) as caught:
            make(bk)
        assert bk.Comm().gather_objects(1) == [1] * 4
        return str(caught.value)

    assert not any("\n" in said for said in ranks(4, run))


def test_a_stage_that_remembers_wants_every_gradient():
    def run():
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = nn.Linear(6, 1), nn.Linear(6, 1)

            def forward(self, x):
                return self.used(x)

        for stage, fine in ((compressed(bk), True), (feedback(bk), False)):
            torch.manual_seed(0)
            module = fully_shard(Two(), mesh=line())
            if fine:
                with bk.interop.fsdp(module, stage):
                    loss(module, dist.get_rank(), 0).backward()
                assert module.unused.weight.grad is None
            else:
                with pytest.raises(RuntimeError, match="got no gradient"), bk.interop.fsdp(module, stage):
                    loss(module, dist.get_rank(), 0).backward()
        return True

    assert all(ranks(2, run))
