"""Shuffles, votes, matches, reductions, matrices and atomic operations, against loops over lanes."""

import random

import numpy as np
import pytest

from ptx.faults import DivergenceFault, MemoryFault, Unknown
from ptx.memory import Region

from . import exact
from .harness import result, run

LANES = 32
SOURCE = random.Random(5)


def shuffled(mode, a, lane, b, c):
    """The manual's definition of `shfl`, for one lane: its value and predicate."""
    b, segment, clamp = b & 31, c >> 8 & 31, c & 31
    top, first = (lane & segment) | (clamp & ~segment & 31), lane & segment
    j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": first | (b & ~segment & 31)}[mode]
    inside = j >= top if mode == "up" else j <= top
    return a[j if inside else lane], inside


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("c", [0, 31, 0x1C03, 0x1800, 0x181F, 0x100F])
def test_shuffles_within_segments(mode, c):
    a = [SOURCE.getrandbits(32) for _ in range(LANES)]
    for b in (0, 1, 3, 16, 31, 33):
        registers = {"d": ("b32", None), "p": ("pred", None), "a": ("b32", a)}
        frame = run(f"shfl.sync.{mode}.b32 %d|%p, %a, {b}, {c}, -1;", LANES, registers)
        expected = [shuffled(mode, a, lane, b, c) for lane in range(LANES)]
        assert list(zip(frame.registers["%d"].tolist(), frame.registers["%p"].tolist(), strict=True)) == expected


def test_every_lane_may_ask_for_another():
    b = [SOURCE.randrange(32) for _ in range(2 * LANES)]
    a = [SOURCE.getrandbits(32) for _ in range(2 * LANES)]
    got = result("shfl.sync.idx.b32 %d, %a, %b, 31, -1", "b32", a=("b32", a), b=("b32", b))
    assert got == [a[k // 32 * 32 + b[k]] for k in range(2 * LANES)]


def test_a_lane_that_the_mask_does_not_name_cannot_be_read():
    lines = "mov.u32 %a, %tid.x;\nsetp.ge.u32 %p, %a, 8;\n@%p ret;\nshfl.sync.bfly.b32 %d, %a, 8, 31, 255;"
    with pytest.raises(DivergenceFault, match="thread 0 of program 0 reads a lane that its mask does not name"):
        run(lines, LANES, {"a": ("b32", None), "d": ("b32", None), "p": ("pred", None)})


def test_votes():
    holds = [SOURCE.random() < 0.5 for _ in range(2 * LANES)]
    bits = [sum(holds[32 * w + k] << k for k in range(32)) for w in (0, 1)]
    got = result("vote.sync.ballot.b32 %d, %a, -1", "b32", a=("pred", holds))
    assert got == [bits[0]] * 32 + [bits[1]] * 32
    for pattern, expected in (
        (holds[:32], (False, True, False)),
        ([True] * 32, (True, True, True)),
        ([False] * 32, (False, False, True)),
    ):
        for mode, wanted in zip(("all", "any", "uni"), expected, strict=True):
            assert result(f"vote.sync.{mode}.pred %d, %a, -1", "pred", a=("pred", pattern)) == [wanted] * 32


def test_matches():
    a = [SOURCE.randrange(4) for _ in range(LANES)]
    expected = [sum((a[k] == a[lane]) << k for k in range(LANES)) for lane in range(LANES)]
    assert result("match.sync.any.b32 %d, %a, -1", "b32", a=("b32", a)) == expected
    registers = {"d": ("b32", None), "p": ("pred", None), "a": ("b64", [1 << 40] * 32 + a + a[:0])}
    frame = run("match.sync.all.b64 %d|%p, %a, -1;", 64, registers)
    assert frame.registers["%d"].tolist() == [0xFFFFFFFF] * 32 + [0] * 32
    assert frame.registers["%p"].tolist() == [True] * 32 + [False] * 32


def test_reductions_of_integers():
    a = [SOURCE.getrandbits(32) for _ in range(2 * LANES)]

    def signed(x):
        return x - (x >> 31 << 32)

    rules = {
        "add.u32": lambda row: sum(row), "add.s32": lambda row: sum(map(signed, row)), "min.u32": min, "max.u32": max,
        "min.s32": lambda row: min(map(signed, row)), "max.s32": lambda row: max(map(signed, row)),
        "and.b32": lambda row: __import__("functools").reduce(int.__and__, row),
        "or.b32": lambda row: __import__("functools").reduce(int.__or__, row),
        "xor.b32": lambda row: __import__("functools").reduce(int.__xor__, row),
    }  # fmt: skip
    for name, rule in rules.items():
        op, kind = name.split(".")
        got = result(f"redux.sync.{op}.{kind} %d, %a, -1", "b32", a=("b32", a))
        assert got == [rule(a[:32]) % (1 << 32)] * 32 + [rule(a[32:]) % (1 << 32)] * 32, name


def test_a_reduction_of_those_that_the_mask_names():
    mask = [0xFFFF] * 16 + [0xFFFF0000] * 16
    got = result("redux.sync.add.s32 %d, %a, %b", "b32", a=("b32", range(LANES)), b=("b32", mask))
    assert got == [sum(range(16))] * 16 + [sum(range(16, 32))] * 16


def test_reductions_of_floats_pass_over_nan_and_know_the_sign_of_zero():
    one, minus, nan = 0x3F800000, 0x80000000, 0x7FC00001
    rows = {
        (nan,) * 32: (0x7FFFFFFF, 0x7FFFFFFF, 0x7FFFFFFF), (nan,) * 31 + (one,): (one, one, 0x7FFFFFFF),
        (0,) * 16 + (minus,) * 16: (minus, 0, 0), (one,) * 31 + (one | minus,): (one | minus, one, one),
        (0xFF800000, 1) * 16: (0xFF800000, 1, 1),
    }  # fmt: skip
    for row, (least, greatest, strict) in rows.items():
        assert result("redux.sync.min.f32 %d, %a, -1", "b32", a=("b32", row)) == [least] * 32
        assert result("redux.sync.max.f32 %d, %a, -1", "b32", a=("b32", row)) == [greatest] * 32
        assert result("redux.sync.max.NaN.f32 %d, %a, -1", "b32", a=("b32", row)) == [strict] * 32
    assert result("redux.sync.max.abs.f32 %d, %a, -1", "b32", a=("b32", (0,) * 31 + (one | minus,))) == [one] * 32
    drawn = [
        x
        for x in (SOURCE.getrandbits(32) for _ in range(64))
        if not exact.is_nan(x, "f32") and x & 0x7F800000 != 0x7F800000
    ][:32]
    greatest = max(drawn, key=lambda x: exact.decode(x, "f32"))
    assert result("redux.sync.max.f32 %d, %a, -1", "b32", a=("b32", drawn)) == [greatest] * 32


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_stored_and_loaded(count, transposed):
    """Row r of matrix m is at the address that lane 8 m + r gives; each lane has two halves of a row or column."""
    names = [f"v{k}" for k in range(count)]
    values = {name: [SOURCE.getrandbits(32) for _ in range(LANES)] for name in names}
    vector, suffix = "{" + ", ".join(f"%{name}" for name in names) + "}", ".trans" if transposed else ""
    rows = [16 * ((5 * lane + 3) % 32) for lane in range(LANES)]  # anywhere
    registers = {name: ("b32", values[name]) for name in names} | {"a": ("b32", rows)}
    frame = run(f"stmatrix.sync.aligned.m8n8.x{count}{suffix}.shared.b16 [%a], {vector};", LANES, registers, shared=512)
    halves = frame.shared.bytes.view(np.uint16)
    for matrix, name in enumerate(names):
        for lane in range(LANES):
            for half in (0, 1):
                row, column = lane // 4, 2 * (lane % 4) + half
                row, column = (column, row) if transposed else (row, column)
                stored = halves[rows[8 * matrix + row] // 2 + column]
                assert stored == values[name][lane] >> 16 * half & 0xFFFF
    back = {f"w{k}": ("b32", None) for k in range(count)}
    loaded = "{" + ", ".join(f"%{name}" for name in back) + "}"
    lines = f"""stmatrix.sync.aligned.m8n8.x{count}{suffix}.shared.b16 [%a], {vector};
    ldmatrix.sync.aligned.m8n8.x{count}{suffix}.shared.b16 {loaded}, [%a];"""
    frame = run(lines, LANES, registers | back, shared=512)
    for name, other in zip(names, back, strict=True):
        assert frame.registers[f"%{other}"].tolist() == values[name]


def test_a_row_of_a_matrix_must_be_aligned():
    registers = {"a": ("b32", [8 if k == 3 else 0 for k in range(LANES)]), "d": ("b32", None)}
    with pytest.raises(MemoryFault, match="thread 3 of program 0 accesses address 0x8, which is no multiple of the 16"):
        run("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%d}, [%a];", LANES, registers, shared=512)


ATOMIC = {
    "add.u32": lambda old, b: old + b, "min.u32": min, "max.u32": max, "and.b32": int.__and__, "or.b32": int.__or__,
    "xor.b32": int.__xor__, "exch.b32": lambda old, b: b, "inc.u32": lambda old, b: 0 if old >= b else old + 1,
    "dec.u32": lambda old, b: b if old == 0 or old > b else old - 1,
}  # fmt: skip


@pytest.mark.parametrize("name", ATOMIC)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_lanes_that_meet_come_one_after_another(name, space):
    array = np.array([5, 6, 7, 8], np.uint32)
    region = Region(array.ctypes.data, array.ctypes.data + 16, "x")
    places, values = [SOURCE.randrange(4) for _ in range(LANES)], [SOURCE.getrandbits(3) for _ in range(LANES)]
    memory, found = [5, 6, 7, 8], []
    for place, value in zip(places, values, strict=True):
        found.append(memory[place])
        memory[place] = ATOMIC[name](memory[place], value) % (1 << 32)
    if space == "global":
        registers = {"d": ("b32", None), "a": ("b64", [region.begin + 4 * k for k in places]), "b": ("b32", values)}
        frame = run(f"atom.global.gpu.relaxed.{name} %d, [%a], %b;", LANES, registers, regions=[region])
        assert array.tolist() == memory
    else:
        lines = "".join(f"mov.u32 %c, {k + 5};\nst.shared.b32 [room+{4 * k}], %c;\n" for k in range(4))
        registers = {
            "d": ("b32", None),
            "c": ("b32", None),
            "a": ("b32", [4 * k for k in places]),
            "b": ("b32", values),
        }
        frame = run(f"{lines}atom.shared.{name} %d, [%a], %b;", LANES, registers, shared=16)
        assert frame.shared.bytes.view(np.uint32).tolist() == memory
    assert frame.registers["%d"].tolist() == found


def test_one_of_many_swaps():
    array = np.array([0], np.uint32)
    region = Region(array.ctypes.data, array.ctypes.data + 4, "x")
    registers = {
        "d": ("b32", None),
        "a": ("b64", [region.begin] * LANES),
        "b": ("b32", [0] * LANES),
        "c": ("b32", range(1, 33)),
    }
    frame = run("atom.global.cas.b32 %d, [%a], %b, %c;", LANES, registers, regions=[region])
    assert array.tolist() == [1] and frame.registers["%d"].tolist() == [0] + [1] * 31


def test_reductions_into_memory_return_nothing():
    array = np.zeros(2, np.uint64)
    region = Region(array.ctypes.data, array.ctypes.data + 16, "x")
    registers = {"a": ("b64", [region.begin + 8 * (k % 2) for k in range(LANES)]), "b": ("b64", [1 << 40] * LANES)}
    run("red.global.add.u64 [%a], %b;", LANES, registers, regions=[region])
    assert array.tolist() == [16 << 40] * 2


@pytest.mark.parametrize(
    "line",
    [
        "shfl.bfly.b32 %d, %a, 1, 31, -1",
        "redux.sync.add.f32 %d, %a, -1",
        "atom.global.add.noftz.f16 %d, [%a], %a",
        "vote.ballot.b32 %d, %a",
    ],
)
def test_other_forms_are_refused(line):
    with pytest.raises(Unknown, match="line 8 of the PTX"):
        result(line, "b32", a=("b32", [0] * LANES))
