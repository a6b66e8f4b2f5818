"""Flights by hand: what lands is decided value by value, on whatever tensor, and nothing is let go of under way."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from pool import ranks

import baguakit as bk


def launched():
    """A tensor (2, 3), and its flight through a mean over the ranks."""
    x = torch.arange(6.0).view(2, 3) * (1 + dist.get_rank())
    return x, bk.primitives.launch(bk.stages.Mean(), x, bk.Comm())


def test_it_lands_on_any_tensor_value_by_value():
    """The result where a value is what was launched, else what changed is kept: whatever wrote it, and where."""

    def run():
        x, flight = launched()
        mean = torch.arange(6.0).view(2, 3) * 1.5
        before = x.clone()
        x.data[0, 1] += 10  # which no version counts
        assert torch.equal(flight.land_(x), mean + torch.tensor([[0, 10, 0], [0, 0, 0]]))
        assert torch.equal(flight.result(), mean)
        other = before.clone().mul_(1)  # another tensor, with a version of its own
        other[1, 2] -= 4
        assert torch.equal(launched()[1].land_(other), mean - torch.tensor([[0, 0, 0], [0, 0, 4]]))
        strange = torch.full((2, 3), 100.0)
        assert torch.equal(launched()[1].land_(strange), torch.where(before == 100, mean, 100 + mean - before))
        gaps = torch.stack([before, before], -1)[..., 0]
        assert torch.equal(launched()[1].land_(gaps), mean)
        for dtype in (torch.float64, torch.bfloat16):
            assert torch.equal(launched()[1].land_(before.to(dtype)), mean.to(dtype))
        p = torch.nn.Parameter(before.clone())
        assert torch.equal(launched()[1].land_(p), mean) and p.grad_fn is None

    ranks(2, run)


def test_the_result_is_a_tensor_of_its_own():
    def run():
        x, flight = launched()
        before = x.clone()
        result = flight.result()
        assert torch.equal(x, before) and torch.equal(result, torch.arange(6.0).view(2, 3) * 1.5)
        assert result is not x and result.data_ptr() == flight.result().data_ptr()
        assert torch.equal(flight.land_(x), result) and flight.done()

    ranks(2, run)


def test_what_cannot_land_is_refused_in_words():
    def run():
        x, flight = launched()
        with pytest.raises(ValueError, match=r"a tensor \(2, 3\) on cpu was launched, .* not \(3, 2\) on cpu"):
            flight.land_(x.t())
        with pytest.raises(ValueError, match="is the result of the flight itself"):
            flight.land_(flight.result())
        with pytest.raises(TypeError, match=r"int64"):
            flight.land_(x.long())
        flight.land_(x)
        with pytest.raises(ValueError, match=r"has landed, .* take flight.result\(\)"):
            flight.land_(x)

    ranks(2, run)


def test_a_stage_that_returns_something_else_is_named():
    def run():
        class Strange:
            def init(self, bucket, comm):
                return {}

            def __call__(self, x, state, comm):
                return x[:2]

        flight = bk.primitives.launch(Strange(), torch.zeros(5), bk.Comm())
        with pytest.raises(TypeError, match=r"the stage returned a tensor \(2,\); .*, 5 values"):
            flight.result()

    ranks(1, run)


def test_what_flies_is_kept_until_it_has_landed():
    """A CUDA lane gets its work at once and does it later, when the host has forgotten what it was done on."""

    def run():
        from baguakit.lanes import Flight, Lane
        from baguakit.primitives import flights

        class Done(Flight):
            def __init__(self, value):
                self.value = value

            def result(self):
                return self.value

        class Inline(Lane):
            """As a stream: the host goes through the work at once, and then holds no more of it."""

            def run(self, work, name=""):
                return Done(work())

        class Adding:
            def init(self, bucket, comm):
                return {"sum": {"of": torch.ones(4)}}

            def __call__(self, x, state, comm):
                used.extend(map(weakref.ref, (x, state["sum"]["of"])))
                return x + state["sum"]["of"]

        used = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flights, "lane_of", lambda *_: Inline())
            x = torch.zeros(4)
            flight = bk.primitives.launch(Adding(), x, bk.Comm())
            gc.collect()
            assert all(ref() is not None for ref in used) and len(used) == 2
            flight.land_(x)
            gc.collect()
            assert [ref() for ref in used] == [None, None] and torch.equal(x, torch.ones(4))

    ranks(1, run)
