"""The device for tests is what it says: it has the bits of CPUs, and is as late as it may."""

import math
from functools import partial

import late_device
import pool
import pytest
import torch
from torch import nn
from training import batch, flat, sgd

pytestmark = pytest.mark.skipif(not late_device.supported(), reason="this torch has no devices in Python")
ranks = partial(pool.ranks, late=True)
STEPS = 4


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01, foreach=False)


def test_training_has_the_bits_of_the_cpu():
    """A plain loop, with hooks on gradients, in both flavours."""

    def losses(device, optimizer):
        torch.manual_seed(0)
        layers = [nn.Linear(6, 10), nn.LayerNorm(10), nn.GELU(), nn.Dropout(0.0), nn.Linear(10, 3, bias=False)]
        model, arrived = nn.Sequential(*layers).to(device), []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: arrived.append(p.shape))
        optimizer = optimizer(model.parameters())
        for step in range(STEPS):
            x, _ = (t.to(device) for t in batch(0, step))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), torch.arange(8, device=device) % 3).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return flat(model).cpu(), arrived

    def run():
        for streams in (True, False):
            with late_device.flavour(streams):
                for optimizer in (sgd, adamw):
                    (here, hooks), (there, others) = (losses(device, optimizer) for device in ("cpu", "late"))
                    assert torch.equal(here, there) and hooks == others and here.isfinite().all()

    ranks(1, run)


def test_copies_are_late():
    """To the host, they arrive when it has waited; from the host, they take what it holds then."""

    def run():
        x, host, sent = torch.arange(4.0).to("late"), torch.zeros(4), torch.ones(4)
        y = torch.empty(4, device="late")
        y.copy_(sent, non_blocking=True)
        host.copy_(x + y, non_blocking=True)
        event = torch.late.current_stream().record_event()
        assert host.isnan().all()
        sent.fill_(10.0)
        event.synchronize()
        assert host.tolist() == [10, 11, 12, 13] and event.query()
        with late_device.flavour(streams=False):
            host.copy_(y, non_blocking=True)
            assert host.tolist() == [10] * 4 and not hasattr(torch.late, "Stream")

    ranks(1, run)


def test_streams_do_not_wait_unless_told():
    """Nor does memory that is freed wait for another stream."""

    def read(ordered):
        x, side = torch.full((4,), 3.0, device="late"), torch.late.Stream()
        y = x * 2
        if ordered:
            side.wait_stream(torch.late.current_stream())
            y.record_stream(side)
        with torch.late.stream(side):
            z = y + 1
        del y
        if not ordered:
            torch.late.current_stream().synchronize()
        host = torch.empty(4)
        with torch.late.stream(side):
            host.copy_(z)
        return host.tolist()

    def run():
        assert read(True) == [7.0] * 4 and all(map(math.isnan, read(False)))

    ranks(1, run)
