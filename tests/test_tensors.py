"""Tensors as memory: which of them share it, and their bytes."""

import itertools

import numpy as np
import pytest
import torch

from baguakit.tensors import bytes_of, first_names, overlap, plain


def addresses(x: torch.Tensor) -> list[int]:
    """The address of every byte of every value, as often as a value has it."""
    places = itertools.product(*map(range, x.shape))
    begins = [x.data_ptr() + x.itemsize * sum(i * s for i, s in zip(at, x.stride(), strict=True)) for at in places]
    return [begin + byte for begin in begins for byte in range(x.itemsize)]


def test_overlaps_are_those_of_addresses():
    draw = np.random.default_rng(0)
    memory, seen = torch.zeros(240, dtype=torch.uint8), {True: 0, False: 0}
    for _ in range(2000):
        views = []
        for _ in range(draw.integers(1, 4)):
            dtype = (torch.uint8, torch.int16, torch.float32)[draw.integers(3)]
            base = memory.view(dtype)
            shape = tuple(draw.integers(0 if draw.random() < 0.1 else 1, 5, size=draw.integers(0, 4)))
            stride = tuple(draw.choice([0, 1, 2, 3, 4, 5, 8]) for _ in shape)
            room = len(base) - sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n) - 1
            if room >= 0:
                views.append(base.as_strided(shape, stride, int(draw.integers(0, room + 1))))
        pair = overlap(views)
        every = [address for x in views for address in addresses(x)]
        assert (pair is not None) == (len(set(every)) < len(every))
        if pair is not None:
            here, there = (addresses(views[i]) for i in pair)
            assert len(set(here)) < len(here) if pair[0] == pair[1] else set(here) & set(there)
        seen[pair is None] += 1
    assert min(seen.values()) > 200


def test_one_tensor_has_one_first_name():
    x = torch.zeros(4, 4)
    tensors = {"a": x, "t": x.t(), "again": x.detach(), "row": x[0], "bits": x.view(torch.int32), "view": x.view(4, 4)}
    assert first_names(tensors) == {**{name: name for name in tensors}, "again": "a", "view": "a"}
    empty = torch.zeros(0)
    assert first_names({"a": empty, "b": empty}) == {"a": "a", "b": "b"}
    z = torch.zeros(3, dtype=torch.complex64)
    assert first_names({"z": z, "conjugate": z.conj()}) == {"z": "z", "conjugate": "conjugate"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64])
def test_bytes_are_a_view_whatever_the_stride_of_a_single_value(dtype):
    """A tensor of one value is contiguous with any strides, of which torch views none but 1 as bytes."""
    x = torch.ones(24, dtype=dtype)
    for view in (x, x[5], x[3::30], x.view(4, 6)[:, 2:3][1:2], x[:0], x.view(2, 12)):
        there = bytes_of(view)
        assert there.shape == (view.nbytes,)
        assert there.data_ptr() == view.data_ptr()
        there.fill_(0)
        assert not view.any()
        view.fill_(1)


def test_bytes_of_a_copy_are_refused():
    """A write to them would be lost."""
    z, x = torch.randn(6, dtype=torch.complex64), torch.randn(3, 5)
    for copied in (z.conj(), z.conj().imag, x.t(), x[:, 1:], x.view(-1)[::2]):
        with pytest.raises(ValueError, match="only a contiguous tensor can be viewed as bytes"):
            bytes_of(copied)
        assert plain(copied) is not copied
        assert torch.equal(bytes_of(plain(copied)).view(copied.dtype), copied.flatten())
    for kept in (z, x, x[1:]):
        assert plain(kept) is kept
