"""Arguments as Triton passes them, and the memory of tensors."""

import gc

import pytest
import torch

pytest.importorskip("triton")
from ptx.driver import Executed, raw_argument
from ptx.memory import ARGUMENTS, GAP, PAGE, Global, in_tables, living_tensors, region_of, regions_of


@pytest.mark.parametrize(
    "kind, value, bits",
    [
        ("i32", -1, -1), ("i32", (1 << 31) - 1, (1 << 31) - 1), ("i64", 1 << 40, 1 << 40),
        ("u32", (1 << 32) - 1, (1 << 32) - 1),
        ("i1", True, 1), ("fp32", 1.0, 0x3F800000), ("fp32", -0.0, 0x80000000), ("fp32", 1e-45, 1),
        ("fp64", 1.0, 0x3FF0000000000000), ("fp16", 1.0, 0x3C00), ("bf16", 1.0, 0x3F80),
    ],
)  # fmt: skip
def test_numbers_are_passed_by_their_bits(kind, value, bits):
    assert raw_argument("n", kind, value) == bits


@pytest.mark.parametrize(
    "kind, value, said",
    [
        ("*fp32", torch.empty(3, device="meta"), "x: the executor takes tensors on the CPU, not tensor"),
        ("*fp32", 4096, "x: the executor takes tensors on the CPU, not 4096"),
        ("i32", 1 << 31, "x: 2147483648 does not fit in i32"),
        ("u32", -1, "x: -1 does not fit in u32"),
        ("tensordesc<fp32[4]>", None, "x: the executor knows no argument of type tensordesc"),
    ],
)
def test_other_arguments_are_refused(kind, value, said):
    with pytest.raises(TypeError, match=said):
        raw_argument("x", kind, value)


def test_a_kernel_that_was_compiled_before_runs_where_it_is_launched(monkeypatch):
    """Triton keeps what it has compiled, launcher included."""
    from triton.runtime import driver

    first, second, launched = Executed(90), Executed(90), []
    monkeypatch.setattr(second, "launch", lambda *launch: launched.append(launch))
    launcher = first.launcher_cls("source", "metadata")
    monkeypatch.setattr(driver, "_active", second)
    launcher(3, 2, 1, 0, "program", None, None, None, None, "x", 7)
    assert launched == [("program", "source", "metadata", (3, 2, 1), ("x", 7))]


def test_a_tensor_is_its_own_bytes():
    x = torch.zeros(10, 8)
    assert region_of(x, "x").end - region_of(x, "x").begin == 320
    row = region_of(x[3], "row")
    assert (row.begin, row.end) == (x.data_ptr() + 96, x.data_ptr() + 128)
    column = region_of(x[:, 3], "column")
    assert (column.begin, column.end) == (x.data_ptr() + 12, x.data_ptr() + 9 * 32 + 16)
    assert Global([region_of(x[:0], "empty")]).regions == []
    x.untyped_storage().resize_(0)
    assert Global([region_of(x, "freed")]).regions == []


def test_tensors_that_live_are_found_and_others_are_not():
    x = torch.zeros(12345)
    address = x.data_ptr()
    assert any(each.begin == address and each.end == address + 4 * 12345 for each in living_tensors())
    del x
    gc.collect()
    assert not any(each.begin == address and each.end == address + 4 * 12345 for each in living_tensors())


def test_an_argument_has_an_address_of_its_own_which_tells_the_same_of_lines():
    x = torch.zeros(64)
    first, second, freed = regions_of([("a", x[:32]), ("b", x[32:]), ("c", x[:0])])
    assert (first.end, freed.end) == (second.begin, 0)
    assert [divmod(each.start - ARGUMENTS, GAP) for each in (first, second)] == [
        (place, each.begin % PAGE) for place, each in enumerate((first, second), start=1)
    ]
    assert len(Global([first, second, freed]).regions) == 2


def test_of_the_tensors_that_live_those_in_a_table_are_found():
    x, y = torch.zeros(5000), torch.zeros(5000)
    named = [*in_tables([torch.tensor([[7, x.data_ptr()]]), torch.tensor([3])])]
    assert {(each.begin, each.end) for each in named} == {(x.data_ptr(), x.data_ptr() + 20000)}
    inside = [*in_tables([torch.tensor([y.data_ptr() + 400])])]
    assert {(each.begin, each.end) for each in inside} == {(y.data_ptr(), y.data_ptr() + 20000)}


def test_regions_that_touch_are_one():
    x = torch.zeros(64)
    parts = Global([region_of(x[:32], "a"), region_of(x[32:], "b"), region_of(x[8:16], "c")]).regions
    assert [(each.begin, each.end) for each in parts] == [(x.data_ptr(), x.data_ptr() + 256)]
