"""Values that have changed: what is packed gives them back bit for bit, and kernels pack the same bytes."""

import pytest
import torch
from tiers import slow_unless

from baguakit.kernels import cpu
from baguakit.kernels.changes import cpu as changes_cpu
from baguakit.kernels.changes import definition as changes

SIZES = (1, 2, 4, 8)
LENGTHS = (0, 1, 255, 256, 257, 4095, 4096, 4097, 9000)
SHARES = (0.0, 0.001, 0.03, 0.2, 1.0)
STEPS = (1, 127, 128, 200, 40_000, 2**23, 2**31, 2**62)  # |d| at most: the next step needs a byte more


@pytest.fixture(params=["C", "Triton"])
def kernels(request):
    """The kernels that equal the definition, and the device that they run on."""
    if request.param == "Triton":
        from baguakit.kernels.changes import gpu as changes_gpu

        return changes_gpu, request.getfixturevalue("device")
    if request.config.getoption("ptx"):
        pytest.skip("launches no kernel")
    if cpu.functions("changes") is None:
        pytest.skip("no C compiler")
    return changes_cpu, "cpu"


def drawn(size: int, n: int, share: float, step: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of new and old values, of which about a share differs, by at most `step`."""
    source = torch.Generator().manual_seed(seed)
    old = torch.randint(-128, 128, (n * size,), generator=source, dtype=torch.int8).view(torch.uint8)
    new = old.clone()
    words = new.view(changes.WORDS[size])
    moved = torch.rand(n, generator=source) < share
    d = torch.randint(-step, step + 1, (n,), generator=source)
    words[moved] = (words.long() + d)[moved].to(words.dtype)
    return new, old


def starts_of(heads: torch.Tensor) -> torch.Tensor:
    lengths = changes.lengths_of(heads)
    return lengths.cumsum(0) - lengths


def joined(encoded: tuple[torch.Tensor, list[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    heads, pieces = encoded
    return heads, torch.cat([heads.view(torch.uint8)[:0], *pieces])


def check(new: torch.Tensor, old: torch.Tensor, size: int, kernels) -> set[tuple[int, int]]:
    """Compare kernels with the definition; return the kinds and widths of the blocks."""
    module, device = kernels
    copy, there = old.clone(), old.clone().to(device)
    heads, packed = joined(changes.encode(new, copy, size))
    found, bytes = joined(module.encode(new.to(device), there, size))
    assert torch.equal(found.cpu(), heads)
    assert torch.equal(bytes.cpu(), packed)
    assert torch.equal(there.cpu(), new)
    assert torch.equal(copy, new)
    assert len(packed) <= len(new)
    for each, where in ((changes, "cpu"), kernels):
        x = old.clone().to(where)
        each.add_(x, size, *(part.to(where) for part in (heads, starts_of(heads), packed)))
        assert torch.equal(x.cpu(), new), each
    return {(head >> 20, head >> 16 & 15) for head in heads.tolist()}


@pytest.mark.parametrize("size", slow_unless((2, 4), SIZES))
def test_kernels_pack_the_same_bytes_and_give_the_values_back(size, kernels):
    few = kernels[0] is not changes_cpu  # Triton's interpreter, and an executor, take long
    seen = set()
    for i, n in enumerate(LENGTHS[few:]):
        for share in SHARES[i % 2 :: 2] if few else SHARES:
            for step in STEPS[i % 5 :: 5] if few else STEPS:
                seen |= check(*drawn(size, n, share, min(step, 2 ** (8 * size - 1) - 1), n), size, kernels)
    kinds = {kind for kind, _ in seen}
    assert kinds == {0, changes.LINES, changes.BITMAP, changes.ALL}
    assert size < 4 or few or {width for _, width in seen} >= {0, 1, 2, 3, 4}


def test_a_line_that_changes_whole_is_in_a_bitmap(kernels):
    new, old = drawn(2, 4096, 0.0, 1)
    new.view(torch.int16)[256:512] += 1
    assert check(new, old, 2, kernels) == {(changes.BITMAP, 1)}
    new.view(torch.int16)[256] -= 1
    assert check(new, old, 2, kernels) == {(changes.LINES, 1)}


@pytest.mark.parametrize("pairs", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_drawn_pairs(pairs):
    if cpu.functions("changes") is None:
        pytest.skip("no C compiler")
    source = torch.Generator().manual_seed(pairs)
    for i in range(pairs):
        size = SIZES[i % 4]
        n, exponent = (int(torch.randint(most, (1,), generator=source)) for most in (9001, 8 * size - 1))
        share = float(torch.rand(1, generator=source)) ** 4
        new, old = drawn(size, n, share, 2**exponent, i)
        x = old.clone()
        heads, packed = joined(changes_cpu.encode(new, old, size))
        changes_cpu.add_(x, size, heads, starts_of(heads), packed)
        assert torch.equal(x, new), (i, size, n, share, exponent)
        assert torch.equal(old, new), (i, size, n, share, exponent)
        assert len(packed) <= len(new), (i, size, n, share, exponent)


@pytest.mark.parametrize("n", [0, 1, 3, 1023, 1024, 1025, 5000])
def test_a_byte_that_changes_changes_both_sums_of_its_kib_alone(n):
    if cpu.functions("changes") is None:
        pytest.skip("no C compiler")
    x = torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
    sums = changes.fold(x)
    assert sums.shape == (-(-n // changes.ROW), 2)
    assert torch.equal(changes_cpu.fold(x), sums)
    for at in range(0, n, 7):
        x[at] ^= 1 + at % 255
        differ = changes_cpu.fold(x) != sums
        assert differ[at // changes.ROW].all() and differ.sum() == 2, at
        x[at] ^= 1 + at % 255


def test_sums_are_those_of_whole_numbers():
    x = torch.randint(0, 256, (changes.ROW,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = [int.from_bytes(bytes(x[i : i + 4].tolist()), "little") for i in range(0, changes.ROW, 4)]
    for keys, found in zip(changes.keys().tolist(), changes.fold(x)[0].tolist(), strict=True):
        mixed = [(word + key) % 2**32 for word, key in zip(words, keys, strict=True)]
        assert found % 2**64 == sum(a * b for a, b in zip(mixed[:128], mixed[128:], strict=True)) % 2**64


@pytest.mark.parametrize("threads", [1, 3])
def test_spans_of_all_threads_come_one_behind_the_other(threads, monkeypatch):
    if cpu.functions("changes") is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr(cpu, "threads", lambda values: threads)
    monkeypatch.setattr(changes_cpu, "MANY", 2 * changes_cpu.SPAN)
    for share in (0.03, 1.0):
        check(*drawn(2, 3 * changes_cpu.SPAN * changes.BLOCK + 5000, share, 200), 2, (changes_cpu, "cpu"))
