"""`Comm(kernels=True)`: who may ask for it, and how attachments and compiled programs use the memory of a node."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from torch.fx.experimental.proxy_tensor import make_fx
from training import batch, net, sgd

import baguakit as bk
from baguakit.comm.symmetric import CTAS, Space
from baguakit.flights.runner import _measured, norm
from baguakit.kernels import operators
from baguakit.primitives import compressed, one_kernel


def without_memory():
    words = [torch.zeros(n, dtype=torch.int32) for n in (2, CTAS, 3)]
    return Space(0, *words, 1 << 20, 10**9, [0, 1])


def test_groups_without_gpus_are_refused():
    def run():
        said = "kernels=True averages on GPUs, and this group has gloo for CUDA tensors, not NCCL; use init_process"
        said_nothing = said.replace("gloo", "nothing")
        with pytest.raises(ValueError, match=f"{said}|{said_nothing}"):
            bk.Comm(kernels=True)
        with pytest.raises(TypeError, match="kernels is True or False, not 1"):
            bk.Comm(kernels=1)
        model = net()
        with pytest.raises(ValueError, match="kernels=True"):
            bk.attach(model, sgd(model.parameters()), bk.algorithms.bytegrad(), comm=bk.Comm(kernels=True))
        with patch.object(torch.version, "hip", "7"), pytest.raises(ValueError, match="NVIDIA's GPUs only"):
            bk.Comm(kernels=True)

    ranks(2, run)


def test_ranks_that_ask_for_different_ways_are_named():
    def run():
        model, comm = net(), bk.Comm()._with(kernels=dist.get_rank() == 0)
        said = "rank 0 has kernels=True where rank 1 has kernels=False"
        with pytest.raises(ValueError, match=said):
            bk.attach(model, sgd(model.parameters()), bk.algorithms.bytegrad(), comm=comm)

    ranks(2, run)


class Standing:
    """A node's memory that notes what becomes of it; its means are those over gloo."""

    part = "flat"

    def __init__(self, fails=False):
        self.noted, self.own, self.fails = [], None, fails

    def another(self, group, device):
        self.own = Standing(self.fails)
        return self.own

    def memory(self, x, needed):
        self.noted.append("mean")
        if self.fails and len(self.noted) > 2:  # not as it is attached
            raise RuntimeError("rank 1 has not come to an exchange in one kernel within 5 s")
        return without_memory()

    def __getattr__(self, name):
        return lambda: self.noted.append(name)


def mean_over_gloo_(x, *rest):
    dist.all_reduce(x.mul_(1 / dist.get_world_size()))
    return torch.ones(CTAS, dtype=torch.bool)


def trained(standing, steps=2):
    model, comm = net(), bk.Comm()
    optimizer = sgd(model.parameters())
    with (
        patch.object(one_kernel.operators, "exchange_in_one_kernel_", mean_over_gloo_),
        bk.attach(model, optimizer, bk.algorithms.bytegrad(), comm=comm._with(_node=standing), timeout=5) as att,
    ):
        for step in range(steps):
            x, y = batch(dist.get_rank(), step)
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        return str(att.report()), att.report().rows[0].reason


def test_an_attachment_has_memory_of_its_own_and_says_how_it_flew():
    def run():
        standing = Standing()
        report, reason = trained(standing)
        assert standing.noted == [] and "in one kernel" in report and "in one kernel" in reason
        return standing.own.noted

    for noted in ranks(2, run):
        assert noted == ["mean"] * (2 + 2) + ["check", "close"]  # two of zeros, without and with a residual


def test_errors_of_compression_are_those_of_the_shards_that_are_sent():
    """In one hop and in two."""

    def run():
        found = []
        for values, one_hop in ((1001, 1 << 60), (4001, 0)):
            for standing in (None, Standing()):
                model = torch.nn.Linear(values, 1, bias=False)
                model.weight.data.fill_(1.0)
                rule = bk.during_backward(bk.stages.CompressedMean(bk.compressors.UInt4(block=64)))
                with (
                    patch.object(one_kernel.operators, "exchange_in_one_kernel_", mean_over_gloo_),
                    patch.object(compressed, "ONE_HOP_VALUES", one_hop),
                    bk.attach(model, sgd(model.parameters()), rule, comm=bk.Comm()._with(_node=standing)) as att,
                ):
                    att.compression_error()  # begins to measure
                    model(torch.linspace(-1, 3, values) ** (1 + dist.get_rank())).sum().backward()
                    found.append(att.compression_error())
                assert standing is None or len(standing.own.noted) > 2
        return found

    for one, other, two, another in ranks(2, run):
        assert one == other and two == another and min(*one, *two) > 0


@pytest.mark.slow  # it waits for a timeout
def test_a_flight_without_the_values_of_a_rank_raises_and_ends_the_waits():
    def run():
        standing = Standing(fails=True)
        with pytest.raises(RuntimeError, match="rank 1 has not come to an exchange in one kernel within 5 s"):
            trained(standing)
        return standing.own.noted

    for noted in ranks(2, run):
        assert noted[:3] == ["mean"] * 3 and "stop" in noted and noted[-1] == "close"


class Held:
    """The memory of a node, which is there, and notes whether it is asked while a program is traced."""

    part = "flat"

    def __init__(self):
        self.seen, self.space = [], without_memory()

    @property
    def for_neighbors(self):
        return self

    def memory(self, x, needed, differs=False):
        self.seen.append(torch.compiler.is_compiling())
        return self.space

    def comm(self):
        return object.__new__(bk.Comm)._with(group=None, rank=0, size=2, _flows={}, _node=self)


def five_exchanges(comm):
    """Return, by name, functions of a tensor (2 · k,): whether a CUDA graph can repeat them is in `REPEATED`."""
    p, codec, pairs = (
        bk.primitives,
        bk.compressors.UInt4(),
        {"self_weight": 0.5, "src_weights": {1: 0.5}, "dst_weights": [1], "check": False},
    )
    return {
        "all-gather": lambda x: p.compressed_all_gather(x, None, comm),
        "reduce-scatter": lambda x: p.compressed_reduce_scatter(x, codec, comm),
        "all-to-all": lambda x: p.compressed_all_to_all(x, None, comm),
        "splits": lambda x: p.compressed_all_to_all(x, None, comm, [len(x), 0], [len(x), 0]),
        "weights": lambda x: p.neighbor_mean_(x.clone(), comm=comm, **pairs),
    }


def test_errors_of_compression_are_those_of_rows_that_are_sent(monkeypatch):
    monkeypatch.setattr(one_kernel.operators, "exchange_in_one_kernel_", lambda *given: None)
    p, codec, comm, x = bk.primitives, bk.compressors.UInt4(), Held().comm(), torch.linspace(-1, 2, 600)

    def error(*rows):
        lost = [torch.empty(row.shape) for row in rows]
        for row, each in zip(rows, lost, strict=True):
            codec.compress(row, each)
        return [(norm(row), norm(each)) for row, each in zip(rows, lost, strict=True)]

    for call, rows in (
        (lambda c: p.compressed_all_gather(x, c, comm), [x.view(1, -1)]),
        (lambda c: p.compressed_reduce_scatter(x, c, comm), [x.view(2, -1)]),
        (lambda c: p.compressed_all_to_all(x, c, comm), [x.view(2, -1)]),
        (lambda c: p.compressed_all_to_all(x, c, comm, [200, 0], [200, 400]), [x[200:].view(1, -1)]),
    ):
        tally = []
        call(_measured(codec, tally))
        assert tally == error(*rows)


REPEATED = ("all-gather", "reduce-scatter", "all-to-all")


def test_a_graph_that_would_repeat_splits_or_weights_is_refused(monkeypatch):
    held, kinds = Held(), []
    monkeypatch.setattr(one_kernel.operators, "exchange_in_one_kernel_", lambda *given: kinds.append(given[12]))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        for name, call in five_exchanges(held.comm()).items():
            if name in REPEATED or not capturing:
                call(torch.ones(600))
                continue
            with pytest.raises(RuntimeError, match="a CUDA graph would repeat the splits or weights of an exchange in"):
                call(torch.ones(600))
    rows = ["all_gather", "reduce_scatter", "all_to_all"]
    assert kinds == [*rows, *rows, "all_to_all", "neighbor_mean_"]


@pytest.mark.slow  # imports the compiler
def test_compiled_exchanges_launch_as_others_do(monkeypatch):
    held, kinds = Held(), []
    kernels = SimpleNamespace(Memory=lambda *given: given, Wire=lambda *given, **named: named)
    for kind in ("all_gather", "reduce_scatter", "all_to_all", "neighbor_mean_"):
        kept = lambda *given, kind=kind: kinds.append(kind) or torch.ones(CTAS, dtype=torch.bool)  # noqa: E731
        setattr(kernels, kind, kept)
    monkeypatch.setattr(operators, "imported", lambda *name: kernels)
    comm = held.comm()
    for name, call in five_exchanges(comm).items():
        for each in (call, torch.compile(call, backend="eager")):
            kinds.clear()
            each(torch.ones(600))
            assert len(kinds) == 1, name
        traced = make_fx(call)(torch.ones(600))
        assert "baguakit.exchange_in_one_kernel_.default(" in traced.code, name
    assert held.seen == [False] * 15


def average_twice(x, comm):
    y = 2 * x
    return bk.primitives.mean_(y, comm) + 1


@pytest.mark.slow  # imports the compiler
def test_compiled_programs_launch_as_others_do(monkeypatch):
    """Traced programs have an operator; torch.compile calls between its graphs what asks the device."""
    seen, space = [], without_memory()
    kernels = SimpleNamespace(Memory=lambda *given: given, Wire=lambda *given, **named: named)
    kernels.mean_ = lambda memory, wire, x, *rest: seen.append(wire) or x.mul_(10) > 0
    monkeypatch.setattr(operators, "imported", lambda *name: kernels)
    held = SimpleNamespace(part="flat", memory=lambda x, needed: seen.append(torch.compiler.is_compiling()) or space)
    comm, x = object.__new__(bk.Comm)._with(group=None, rank=0, size=2, _flows={}, _node=held), torch.ones(5)
    compiled = torch.compile(average_twice, backend="eager")
    for call in (average_twice, compiled, compiled, torch.inference_mode()(average_twice)):
        assert torch.equal(call(x, comm), torch.full((5,), 21.0))
    assert seen == [False, {"dtype": torch.float32, "exact": True}] * 4
    traced = make_fx(lambda x: average_twice(x, comm))(x)
    assert "baguakit.exchange_in_one_kernel_.default(" in traced.code
