"""Buckets follow the gradients of the first step where modules run in another order than they were registered in."""

import copy

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from torch import nn

import baguakit as bk
from baguakit.flights.gradients import GradientRunner

LAYERS, WIDTH = 6, 8
LAYER_BYTES = 4 * WIDTH * WIDTH


class Net(nn.Module):
    """Layers that run in the order of their registration, or in the reverse."""

    def __init__(self, backwards):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.backwards = backwards

    def forward(self, x):
        for layer in reversed(self.layers) if self.backwards else self.layers:
            x = torch.tanh(layer(x))
        return x


def train(net, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
        net(torch.randn(4, WIDTH, generator=draw)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("backwards", [False, True])
def test_a_bucket_is_launched_with_each_layer(backwards):
    def work():
        net, launched = Net(backwards), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        plain = GradientRunner.launch_bucket

        def seen(self, i, step, touched, *more):
            launched.append((step, len(touched)))
            plain(self, i, step, touched, *more)

        GradientRunner.launch_bucket = seen
        try:
            with bk.attach(net, optimizer, bk.algorithms.gradient_allreduce(), bucket_bytes=LAYER_BYTES):
                train(net, optimizer, range(3))
        finally:
            GradientRunner.launch_bucket = plain
        return [[reached for step, reached in launched if step == each] for each in range(3)]

    first, *later = ranks(2, work)[0]
    one_by_one = list(range(1, LAYERS + 1))
    assert first == ([LAYERS] * LAYERS if backwards else one_by_one)
    assert later == [one_by_one, one_by_one]


def test_the_order_is_saved_and_a_resume_is_bitwise():
    def work():
        def make():
            net = Net(backwards=True)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            algorithm = bk.algorithms.bytegrad(bk.compressors.UInt4(), error_feedback=True)
            return net, optimizer, bk.attach(net, optimizer, algorithm, bucket_bytes=2 * LAYER_BYTES)

        net, optimizer, att = make()
        with att:
            train(net, optimizer, range(3))
            saved = copy.deepcopy([net.state_dict(), optimizer.state_dict(), att.state_dict()])
            train(net, optimizer, range(3, 6))
        again, optimizer, att = make()
        with att:
            for each, state in zip((again, optimizer, att), saved, strict=True):
                each.load_state_dict(state)
            train(again, optimizer, range(3, 6))
            order = att.state_dict()["order"]
        same = all(torch.equal(p, q) for p, q in zip(net.parameters(), again.parameters(), strict=True))
        return same, order, saved[2]["order"]

    for same, order, saved in ranks(2, work):
        assert same and order == saved == [f"layers.{i}.weight" for i in range(LAYERS)]


def test_ranks_whose_gradients_come_in_other_orders_follow_rank_0():
    def work():
        net = Net(backwards=dist.get_rank() == 0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with bk.attach(net, optimizer, bk.algorithms.gradient_allreduce(), bucket_bytes=LAYER_BYTES) as att:
            train(net, optimizer, range(3))
            return att.consensus_distance(), att.state_dict()["order"][0]

    assert ranks(2, work) == [(0.0, "layers.0.weight")] * 2
