"""Faults planted in small kernels, which executing their PTX finds: run with `--ptx ARCH` (test_executed_here.py)."""

import pytest
import torch

from ptx.faults import MemoryFault, UnwrittenFault

pytestmark = pytest.mark.usefixtures("only_executed")

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def double_kernel(out_ptr, x_ptr, n, TILE: tl.constexpr, MASKED: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if MASKED:
        tl.store(out_ptr + at, tl.load(x_ptr + at, at < n) * 2, at < n)
    else:
        tl.store(out_ptr + at, tl.load(x_ptr + at) * 2)


def double(n, masked=True, out=None, programs=None):
    x = torch.arange(n, dtype=torch.float32)
    out = torch.empty(n) if out is None else out
    double_kernel[(triton.cdiv(n, 128) if programs is None else programs,)](out, x, n, TILE=128, MASKED=masked)
    return out


@pytest.mark.parametrize("n", [0, 1, 127, 128, 1000])
def test_a_kernel_without_a_fault(n):
    assert torch.equal(double(n), 2 * torch.arange(n, dtype=torch.float32))


def test_a_mask_that_was_forgotten():
    with pytest.raises(MemoryFault, match=r"of program 7 accesses .* outside every tensor .* the nearest memory is"):
        double(1000, masked=False)


def test_an_access_beyond_a_view_within_its_storage():
    """A tensor ends where it does, whatever lies beside it."""
    whole = torch.zeros(2048)
    double_kernel[(8,)](whole[1024:], whole[:1024], 1024, TILE=128, MASKED=False)
    with pytest.raises(MemoryFault, match=r"`.*st\.global.*of program 7 .* the nearest memory is out_ptr, which ends"):
        double_kernel[(8,)](whole[1024:2000], whole[:1024], 1024, TILE=128, MASKED=False)
    with pytest.raises(MemoryFault, match=r"`.*ld\.global.*of program 7 .* the nearest memory is x_ptr, which ends"):
        double_kernel[(8,)](whole[1024:], whole[:1000], 1024, TILE=128, MASKED=False)


@triton.jit
def promise_kernel(table_ptr, TILE: tl.constexpr):
    x_ptr = tl.multiple_of(tl.load(table_ptr).to(tl.pointer_type(tl.float32)), 16)
    tl.store(x_ptr + tl.arange(0, TILE), tl.full((TILE,), 1.0, tl.float32))


def test_a_promise_of_alignment_that_is_not_kept():
    x = torch.zeros(600)
    promise_kernel[(1,)](torch.tensor([x[4:].data_ptr()]), TILE=512)
    assert torch.equal(x[4:516], torch.ones(512))
    with pytest.raises(MemoryFault, match=r"thread 0 of program 0 accesses address .* no multiple of the 16 bytes"):
        promise_kernel[(1,)](torch.tensor([x[3:].data_ptr()]), TILE=512)


def test_memory_that_nothing_was_written_to():
    """A kernel may read what another has written, byte for byte, and what torch has."""
    x, out = torch.empty(256), torch.empty(256)
    message = (
        r"double_kernel, line \d+ of the PTX, `.*ld\.global.*`: thread .* reads .* in x_ptr, where nothing was writ"
    )
    with pytest.raises(UnwrittenFault, match=message):
        double_kernel[(1,)](out, x, 128, TILE=128, MASKED=True)
    double_kernel[(1,)](x, torch.ones(128), 100, TILE=128, MASKED=True)
    double_kernel[(1,)](out, x, 100, TILE=128, MASKED=True)
    assert torch.equal(out[:100], torch.full((100,), 4.0))
    with pytest.raises(UnwrittenFault, match="thread 100 of program 0"):
        double_kernel[(1,)](out, x, 101, TILE=128, MASKED=True)
    x[100:120].fill_(3.0)
    double_kernel[(1,)](out, x, 120, TILE=128, MASKED=True)
    with pytest.raises(UnwrittenFault, match="thread 120 of program 0"):
        double_kernel[(2,)](out, x, 256, TILE=128, MASKED=True)
    x[120:].numpy()[:] = 0
    double_kernel[(2,)](out, x, 256, TILE=128, MASKED=True)


def test_a_tensor_elsewhere_is_refused():
    with pytest.raises(TypeError, match="the executor takes tensors on the CPU"):
        double_kernel[(1,)](torch.empty(128), torch.ones(128, device="meta"), 128, TILE=128, MASKED=True)
