"""Parameters as models have them: shared, frozen, unused, empty, lazy, of several dtypes, come and gone."""

import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, made, others_slow
from pool import ranks
from torch import nn
from training import batch, close, flat, loss, mean_loop, net, net_and_sgd, run_steps, sgd

import baguakit as bk
from baguakit.kernels import cpu


class Odd(nn.Module):
    """A shared parameter, a frozen one, one that is never used, one used on some ranks only, and two dtypes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.never = nn.Parameter(torch.randn(4))
        self.some = nn.Parameter(torch.randn(6))
        self.precise = nn.Linear(6, 1, dtype=torch.float64)

    def forward(self, x, some):
        x = self.two(torch.tanh(self.one(x))) + self.frozen
        return self.precise((x * self.some if some else x).double())


def odd_backward(m, rank, step):
    x, y = batch(rank, step)
    (m(x, rank == 1 and step % 2 == 0) - y).square().mean().backward()


def test_shared_frozen_unused_and_mixed_parameters():
    expected = mean_loop(3, odd_backward, model=Odd)

    def run():
        m = Odd()
        o = torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)
        missing = []
        with bk.attach(m, o, bk.algorithms.gradient_allreduce(), bucket_bytes=100):
            for step in range(4):
                o.zero_grad()
                odd_backward(m, dist.get_rank(), step)
                missing.append((m.never.grad is None, m.some.grad is None))
                o.step()
        return flat(m), missing

    for x, missing in ranks(3, run):
        close(x, flat(expected))
        assert missing == [(True, False), (True, True)] * 2


def test_everything_begins_as_on_rank_0():
    def run():
        torch.manual_seed(dist.get_rank())
        m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        m[0].bias.requires_grad = False
        o = torch.optim.AdamW(m.parameters(), lr=0.1 + dist.get_rank())
        m(torch.randn(5, 4)).sum().backward()
        o.step()
        with bk.attach(m, o, bk.algorithms.gradient_allreduce()):
            moments = [o.state[p]["exp_avg"].flatten() for p in m.parameters() if p.requires_grad]
            held = torch.cat([*(x.detach().flatten().double() for x in [*m.parameters(), *m.buffers()]), *moments])
            return held, o.param_groups[0]["lr"]

    results = ranks(3, run)
    assert all(torch.equal(results[0][0], held) and lr == 0.1 for held, lr in results)


def test_broadcast_may_be_declined():
    def run():
        m = nn.Linear(1, 1)
        nn.init.constant_(m.weight, dist.get_rank())
        with bk.attach(m, sgd(m.parameters()), bk.algorithms.decentralized(order="atc"), broadcast=False) as att:
            apart = att.consensus_distance()
            att.merge()
            return m.weight.item(), apart, att.consensus_distance()

    for weight, apart, together in ranks(3, run):
        assert weight == 1.0 and together < 1e-6 and apart >= (2 / 3) ** 0.5 - 1e-6


def test_what_is_equal_on_all_ranks_is_not_sent():
    def run(odd):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 4), nn.BatchNorm1d(4))
        m[0].requires_grad_(False)
        o = torch.optim.Adam(m[1:].parameters(), lr=0.1)
        m(torch.randn(8, 30)).square().sum().backward()
        o.step()
        with torch.no_grad():
            held = dict(m.named_parameters()) | dict(m.named_buffers())
            held["mean"] = o.state[m[1].weight]["exp_avg"]
            for name in odd:
                held[name].fill_(dist.get_rank())
        sent, broadcast = [], bk.Comm.broadcast
        bk.Comm.broadcast = lambda comm, x, source=0: (sent.append(x.numel()), broadcast(comm, x, source))[1]
        try:
            with bk.attach(m, o, bk.algorithms.gradient_allreduce()):
                return sent, [x.clone() for x in held.values()], o.state[m[1].weight]["exp_avg"].clone()
        finally:
            bk.Comm.broadcast = broadcast

    for odd, nbytes in (((), []), (("0.weight", "2.running_var", "mean"), [3600, 16, 480])):
        results = ranks(3, run, odd)
        assert [sent for sent, _, _ in results] == [nbytes] * 3
        for _, held, mean in results[1:]:
            assert torch.equal(mean, results[0][2])
            assert all(torch.equal(a, b) for a, b in zip(held[:-1], results[0][1][:-1], strict=True))


def test_empty_parameter_groups_and_parameters():
    def run():
        m = net()
        m.register_parameter("empty", nn.Parameter(torch.empty(0)))
        o = torch.optim.SGD([{"params": []}, {"params": list(m.parameters())}], lr=0.1)
        with bk.attach(m, o, bk.algorithms.gradient_allreduce(), bucket_bytes=1) as att:
            loss(m, dist.get_rank(), 0).backward()
            o.step()
            return att.consensus_distance()

    assert ranks(2, run) == [0.0, 0.0]


RULES = {
    "bytegrad": lambda bk: bk.algorithms.bytegrad(error_feedback=True),
    "qadam": lambda bk: bk.algorithms.qadam(warmup_steps=1),
    "ef21": lambda bk: bk.algorithms.ef21(bk.compressors.MinMaxUInt8()),
    "low_precision_decentralized": lambda bk: bk.algorithms.low_precision_decentralized(),
    "choco": lambda bk: bk.algorithms.choco(),
    "diloco": lambda bk: bk.algorithms.diloco(every=1, inner=bk.stages.ErrorFeedback(bk.stages.CompressedMean())),
}


def first_steps(rules, dtype_name):
    """Return, by algorithm, the number of libraries that attach loaded, and of those that the steps after it did."""
    found = {}
    for name, rule in rules.items():
        cpu.functions.cache_clear()
        model = torch.nn.Linear(300, 300).to(getattr(torch, dtype_name))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with bk.attach(model, optimizer, rule(bk)):
            attached = cpu.functions.cache_info().misses
            for _ in range(3):
                model(torch.ones(2, 300, dtype=model.weight.dtype)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        found[name] = attached, cpu.functions.cache_info().misses - attached
    return found


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_after_attach_no_step_loads_a_library(dtype):
    for found in ranks(2, first_steps, RULES, dtype):
        assert all(attached > 0 and later == 0 for attached, later in found.values()), found


def test_a_lazy_parameter_is_named():
    def run():
        model = torch.nn.Sequential(torch.nn.LazyLinear(4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for broadcast in (True, False):
            with pytest.raises(TypeError, match=r"0\.weight has no shape yet; run a forward pass"):
                bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), broadcast=broadcast)

    ranks(2, run)


@pytest.mark.parametrize("algorithm", others_slow(ALGORITHMS))
def test_an_attachment_made_in_inference_mode_trains(algorithm):
    def run():
        model, optimizer = net_and_sgd()
        with torch.inference_mode():
            attachment = bk.attach(model, optimizer, made(algorithm))
        with attachment:
            run_steps(model, optimizer, range(3))
            return attachment.step

    assert ranks(2, run) == [3, 3]
