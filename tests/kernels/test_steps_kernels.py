"""Optimizer steps: the kernels equal their definition bit for bit, in one launch over tables of tensors."""

import itertools
from dataclasses import replace

import pytest
import torch

from baguakit.compressors import MinMaxUInt8
from baguakit.kernels.steps import definition as steps
from baguakit.kernels.steps import operators as steps_table
from baguakit.kernels.steps.definition import SGD, Adam, Columns, Conditions, Lion

pytest.importorskip("triton")
from baguakit.kernels.steps import gpu as steps_launch

RULES = [
    SGD(),
    SGD(weight_decay=0.01),
    SGD(0.9, 0.1, 0.01),
    SGD(0.9, 0.0, 0.01, nesterov=True),
    Adam(),
    Adam(weight_decay=0.1),
    Adam(0.8, 0.95, 1e-5, 0.1, decoupled=True),
    Lion(weight_decay=0.1),
]
FORMS = [  # p, g, master, key
    (torch.float32, torch.float32, False, None),
    (torch.float32, torch.bfloat16, False, None),
    (torch.bfloat16, torch.float16, False, None),
    (torch.float16, torch.float16, True, None),
    (torch.bfloat16, torch.bfloat16, True, None),
    (torch.bfloat16, torch.bfloat16, False, 5),
]
LENGTHS = [1100, 1030, 0, 1]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().cpu().view(torch.uint8)


def same(a, b) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True) if x is not None)


def drawn_columns(rule, form, lengths=LENGTHS, seed=0) -> Columns:
    p_dtype, g_dtype, mastered, _ = form
    source = torch.Generator().manual_seed(seed)
    p = [torch.randn(n, generator=source).to(p_dtype) for n in lengths]
    # A second of three gradients begins at an odd address, as views of a bucket do: it cannot be read 16 bytes at once.
    g = [torch.randn(n + 1, generator=source).to(g_dtype)[i % 2 :][:n] for i, n in enumerate(lengths)]
    states = {name: [torch.rand(n, generator=source) for n in lengths] for name in "uv"[: rule.states]}
    return {"p": p, "g": g} | states | ({"master": [x.float() + 1e-4 for x in p]} if mastered else {})


def moved(x: Columns, device: str) -> Columns:
    """The same values in tensors of their own, g at the same alignment."""

    def copies(tensors):
        return [None if t is None else t.clone().to(device) for t in tensors]

    g = []
    for t in x["g"]:
        offset = t.storage_offset()
        room = torch.zeros(len(t) + offset, dtype=t.dtype, device=device)
        g.append(room[offset:].copy_(t))
    return {name: copies(column) for name, column in x.items()} | {"g": g}


def all_same(a: Columns, b: Columns) -> bool:
    """Return whether all that a step writes is the same."""
    return all(same(a[name], b[name]) for name in a if name != "g")


def on(device, conditions: dict) -> Conditions:
    return Conditions(
        **{name: x.clone().to(device) if isinstance(x, torch.Tensor) else x for name, x in conditions.items()}
    )


HOST = {"lr": 0.1, "taken": 6, "grad_scale": 3.0, "clip": 0.7}
HELD = {name: torch.tensor(value) for name, value in (HOST | {"taken": 6.0, "found_inf": 0.0}).items()}


def equal_after_a_step(rule, form, conditions, device, lengths=LENGTHS) -> bool:
    theirs = drawn_columns(rule, form, lengths)
    ours = moved(theirs, device)
    mine, other = on(device, conditions | {"key": form[3]}), on("cpu", conditions | {"key": form[3]})
    steps.step_(rule, theirs, other)
    steps_launch.step_(rule, steps_table.tables_of(ours), mine)
    counted = not isinstance(mine.taken, torch.Tensor) or int(mine.taken) == int(other.taken)
    return counted and all_same(ours, theirs)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_kernel_equals_the_definition(rule, device):
    assert equal_after_a_step(rule, FORMS[0], HOST, device)
    assert equal_after_a_step(rule, FORMS[0], HELD, device)


@pytest.mark.parametrize("form", FORMS[1:], ids=str)
def test_whatever_the_dtypes(form, device):
    assert equal_after_a_step(Adam(weight_decay=0.1, decoupled=True), form, HELD, device)


@pytest.mark.slow  # the interpreter
@pytest.mark.parametrize("form, rule, held", list(itertools.product(FORMS, RULES, (HOST, HELD))), ids=str)
def test_every_cell(form, rule, held, device):
    for taken in (0, 6, 12345):
        count = torch.tensor(taken) if isinstance(held["taken"], torch.Tensor) else taken
        assert equal_after_a_step(rule, form, held | {"taken": count}, device)


def test_numbers_of_which_only_one_lies_on_the_device(device):
    for name in HELD:
        assert equal_after_a_step(SGD(0.9, 0.1), FORMS[0], HOST | {name: HELD[name]}, device, [5]), name


def test_mixed_lists_make_one_launch_for_each_kind(device, monkeypatch):
    launched = counting(monkeypatch, steps_launch)
    rule, forms = Adam(), [FORMS[0], FORMS[4], FORMS[0], FORMS[4]]
    theirs = [drawn_columns(rule, form, [700], i) for i, form in enumerate(forms)]
    both = {name: [x.get(name, [None])[0] for x in theirs] for name in ("p", "g", "u", "v", "master")}
    ours = moved(both, device)
    steps.step_(rule, both, Conditions(0.1, 3))
    steps_launch.step_(rule, steps_table.tables_of(ours), Conditions(0.1, 3))
    assert all_same(ours, both) and len(launched) == 2


@pytest.mark.parametrize("block", [64, 512, 2048])
def test_packed_gradients_are_read_as_they_decompress(block, device):
    """Tiles of several blocks, and blocks of several tiles."""
    compressor, rule, n = MinMaxUInt8(block), Adam(decoupled=True), 2100
    theirs = drawn_columns(rule, FORMS[4], [n])
    packed = compressor.compress(theirs["g"][0].view(1, -1))
    theirs["g"][0] = compressor.decompress(packed, n)[0]
    ours = moved(theirs, device)
    ours["g"][0] = packed.view(-1).to(device)
    steps.step_(rule, theirs, Conditions(**HOST))
    steps_launch.step_(rule, steps_table.tables_of(ours), Conditions(**HOST), block)
    assert all_same(ours, theirs)


def counting(monkeypatch, steps_launch) -> list[int]:
    """The number of programs of each launch from here on, seen where Triton is entered."""
    launched: list[int] = []
    for name in ("step_kernel", "numbers_kernel"):
        kernel = getattr(steps_launch, name)

        class Seen:
            def __init__(self, kernel):
                self.kernel = kernel

            def __getitem__(self, grid):
                launched.append(grid[0])
                return self.kernel[grid]

        monkeypatch.setattr(steps_launch, name, Seen(kernel))
    return launched


def test_ten_thousand_tensors_are_one_launch(device, monkeypatch):
    launched = counting(monkeypatch, steps_launch)
    if device == "cpu":  # interpreted, ten thousand programs take a minute: it is enough that they are launched
        monkeypatch.setattr(steps_launch.step_kernel, "kernel", {(10_000,): lambda *args, **options: None})
    x = drawn_columns(SGD(), FORMS[0], [3] * 10_000)
    steps_launch.step_(SGD(), steps_table.tables_of(moved(x, device)), Conditions(0.1))
    assert launched == [10_000]


def test_tiles_cover_every_value_once_even_beyond_2_to_the_31():
    lengths = [0, 5 * 2**31 + 3, 1, 1024]
    tiles = steps_table._tiles(torch.tensor(lengths).numpy(), 1 << 20)
    records, numbers = tiles >> 32, tiles & 0xFFFFFFFF
    for i, n in enumerate(lengths):
        mine = numbers[records == i]
        assert mine.tolist() == list(range(-(-n // (1 << 20))))
    assert tiles.dtype == "int64"


def test_addresses_and_positions_are_64_bits_wide(device):
    """A tile far beyond 2³¹ of a tensor that begins as far before its memory: the same values are reached."""
    theirs = drawn_columns(SGD(), FORMS[5], [1024])
    ours = moved(theirs, device)
    tables, tile = steps_table.tables_of(ours), 3 << 21  # 3 · 2³¹ values of 1024
    # A second record, of which there is no tile, names the memory: an executor of PTX knows no other.
    ((kind, (tiles, records)),) = tables.by_kind.items()
    records = records.repeat(2, 1)
    tables = replace(tables, by_kind={kind: [tiles, records]})
    records[0, 0] -= 2 * 1024 * tile
    records[0, 1] -= 2 * 1024 * tile
    records[0, 5] = records[0, 7] = 0
    records[0, 5] += 1024 * (tile + 1)
    tiles[0] = tile
    weights = steps.dense(theirs["p"][0])
    new = SGD().apply(weights.float(), theirs["g"][0].float(), [], [torch.tensor(x) for x in SGD().numbers(0.5, 2)])
    expected = steps.drawn(new, 1024 * tile, steps.numbers_of(SGD(), Conditions(0.1, 1, key=9))[2])
    steps_launch.step_(SGD(), tables, Conditions(0.5, key=9))
    assert torch.equal(bits(ours["p"][0]), bits(expected))


@pytest.mark.parametrize("rule", [SGD(0.9), Adam(), Lion()], ids=str)
def test_what_is_not_finite_leaves_everything_as_it_was(rule, device):
    for run, where in (
        (steps.step_, "cpu"),
        (lambda r, x, c: steps_launch.step_(r, steps_table.tables_of(x), c), device),
    ):
        x = moved(drawn_columns(rule, FORMS[4], [700, 9]), where)
        before = moved(x, where)
        conditions = on(where, HELD | {"found_inf": torch.tensor(1.0)})
        for _ in range(2):
            run(rule, x, conditions)
        assert all_same(x, before) and int(conditions.taken) == 6


def test_nan_is_passed_on(device):
    for rule in RULES:
        x = drawn_columns(rule, FORMS[0], [40])
        x["g"][0][7] = float("nan")
        ours = moved(x, device)
        steps.step_(rule, x, Conditions(0.1, 3))
        steps_launch.step_(rule, steps_table.tables_of(ours), Conditions(0.1, 3))
        assert x["p"][0].isnan().nonzero().tolist() == ours["p"][0].isnan().nonzero().tolist() == [[7]]
