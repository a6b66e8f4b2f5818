"""Moves, loads and stores: bytes go where they should, and what is out of bounds or misaligned is named."""

import numpy as np
import pytest

from ptx.faults import MemoryFault, Unknown
from ptx.machine import Frame, Launch, Program
from ptx.memory import POISON, Global, Region
from ptx.tests.corners.harness import run

LANES = 32


def room(size):
    """Bytes 0, 1, 2, …, at a multiple of 16, as an array and as a region."""
    whole = np.zeros(size + 16, np.uint8)
    skip = -whole.ctypes.data % 16
    array = whole[skip : skip + size]
    array[:] = np.arange(size) % 251
    return array, Region(array.ctypes.data, array.ctypes.data + size, "x")


def little(array, at, size):
    return int.from_bytes(bytes(array[at : at + size]), "little")


def addresses(region, step, count=LANES):
    return ("b64", [region.begin + step * k for k in range(count)])


@pytest.mark.parametrize(
    "kind, register, size",
    [("b8", "b16", 1), ("u8", "b32", 1), ("b16", "b16", 2), ("b32", "b32", 4), ("b64", "b64", 8)],
)
def test_loads(kind, register, size):
    array, region = room(LANES * size)
    frame = run(
        f"ld.global.{kind} %d, [%a];", LANES, {"d": (register, None), "a": addresses(region, size)}, regions=[region]
    )
    assert frame.registers["%d"].tolist() == [little(array, k * size, size) for k in range(LANES)]


def test_a_signed_load_fills_a_wider_register_with_the_sign():
    array, region = room(64)
    array[:] = 0x80 + np.arange(64)
    frame = run("ld.global.s8 %d, [%a+1];", LANES, {"d": ("b32", None), "a": addresses(region, 1)}, regions=[region])
    assert frame.registers["%d"].tolist() == [0xFFFFFF81 + k for k in range(LANES)]


@pytest.mark.parametrize("count, register, size", [(2, "b32", 4), (4, "b32", 4), (2, "b64", 8), (4, "b16", 2)])
def test_vectors_are_loaded_and_stored_in_order(count, register, size):
    array, region = room(LANES * count * size)
    other, target = room(LANES * count * size)
    other[:] = 0
    names = [f"v{k}" for k in range(count)]
    vector = "{" + ", ".join(f"%{name}" for name in names) + "}"
    registers = dict.fromkeys(names, (register, None))
    registers |= {"a": addresses(region, count * size), "b": addresses(target, count * size)}
    lines = f"ld.global.v{count}.{register} {vector}, [ %a + 0 ];\nst.global.v{count}.{register} [ %b + 0 ], {vector};"
    frame = run(lines, LANES, registers, regions=[region, target])
    for place, name in enumerate(names):
        assert frame.registers[f"%{name}"].tolist() == [
            little(array, (k * count + place) * size, size) for k in range(LANES)
        ]
    assert np.array_equal(array, other)


def test_a_store_keeps_the_lowest_bits_and_its_neighbours():
    array, region = room(128)
    before = array.copy()
    run(
        "st.global.b8 [%a], %b;",
        LANES,
        {"a": addresses(region, 4), "b": ("b16", [0xAA00 + k for k in range(LANES)])},
        regions=[region],
    )
    assert array[::4].tolist() == list(range(LANES)) and np.array_equal(
        array.reshape(-1, 4)[:, 1:], before.reshape(-1, 4)[:, 1:]
    )


def test_only_those_for_whom_the_guard_holds_access():
    array, region = room(4 * 16)
    a = ("b64", [region.begin + 4 * k if k < 16 else 8 for k in range(LANES)])  # the others' addresses are wild
    registers = {"d": ("b32", [7] * LANES), "a": a, "p": ("pred", [k < 16 for k in range(LANES)])}
    frame = run("@%p ld.global.b32 { %d }, [ %a + 0 ];", LANES, registers, regions=[region])
    assert frame.registers["%d"].tolist() == [little(array, 4 * k, 4) for k in range(16)] + [7] * 16
    registers["p"] = ("pred", [k >= 16 for k in range(LANES)])
    frame = run("@!%p ld.global.b32 { %d }, [ %a + 0 ];", LANES, registers, regions=[region])
    assert frame.registers["%d"].tolist() == [little(array, 4 * k, 4) for k in range(16)] + [7] * 16
    registers["p"] = ("pred", [False] * LANES)
    assert run("@%p ld.global.b32 %d, [%a];", LANES, registers).registers["%d"].tolist() == [7] * LANES


@pytest.mark.parametrize("offset, where", [(1, "ends 4 bytes before"), (-1, "4 bytes further on"), (1 << 20, "ends")])
def test_an_access_outside_is_named(offset, where):
    _, region = room(4 * LANES)
    registers = {"d": ("b32", None), "a": ("b64", [region.begin + 4 * (k + offset) for k in range(LANES)])}
    thread = "thread 31" if offset == 1 else "thread 0"
    message = rf"line 8 of the PTX, `ld.global.b32 %d, \[%a\]`: {thread} of program 0 accesses 4 bytes .*{where}"
    with pytest.raises(MemoryFault, match=message):
        run("ld.global.b32 %d, [%a];", LANES, registers, regions=[region])


def test_the_last_bytes_can_be_reached_but_not_passed():
    array, region = room(4 * LANES + 2)
    last = ("b64", [region.begin + 4 * LANES] * LANES)
    frame = run("ld.global.b16 %d, [%a];", LANES, {"d": ("b16", None), "a": last}, regions=[region])
    assert frame.registers["%d"].tolist() == [little(array, 4 * LANES, 2)] * LANES
    with pytest.raises(MemoryFault, match="ends 2 bytes before the end of the access"):
        run("ld.global.b32 %d, [%a];", LANES, {"d": ("b32", None), "a": last}, regions=[region])
    with pytest.raises(MemoryFault, match="ends 1 bytes before the end of the access"):
        run("ld.global.b8 %d, [%a+2];", LANES, {"d": ("b32", None), "a": last}, regions=[region])


@pytest.mark.parametrize(
    "line, at", [("ld.global.b32 %d, [%a]", 2), ("ld.global.v2.b32 {%d, _}, [%a]", 4), ("st.global.b32 [%a], %d", 1)]
)
def test_a_misaligned_access_is_named(line, at):
    _, region = room(256)
    registers = {"d": ("b32", [0] * LANES), "a": ("b64", [region.begin + at * (k == 5) for k in range(LANES)])}
    with pytest.raises(
        MemoryFault, match=r"thread 5 of program 0 accesses address 0x[0-9a-f]+, which is no multiple of"
    ):
        run(f"{line};", LANES, registers, regions=[region])


def test_two_tensors_are_two():
    """Between them lies memory that the kernel was not given."""
    _, region = room(256)
    parts = [Region(region.begin, region.begin + 64, "x"), Region(region.begin + 128, region.end, "y")]
    registers = {"d": ("b32", None), "a": ("b64", [region.begin + 128] + [region.begin] * 31)}
    run("ld.global.b32 %d, [%a];", LANES, registers, regions=parts)
    registers["a"] = ("b64", [region.begin + 64] + [region.begin] * 31)
    with pytest.raises(MemoryFault, match="outside every tensor that the kernel can know: the nearest memory is x"):
        run("ld.global.b32 %d, [%a];", LANES, registers, regions=parts)


# Shared memory.


def test_every_program_has_its_own_shared_memory():
    lines = "mov.u32 %b, %ctaid.x;\nst.shared.b32 [%a+4], %b;\nld.shared.b32 %d, [%a+4];\nld.shared.b32 %c, [room];"
    registers = {
        "a": ("b32", [4 * (k % LANES) for k in range(3 * LANES)]),
        "b": ("b32", None),
        "c": ("b32", None),
        "d": ("b32", None),
    }
    frame = run(lines, LANES, registers, programs=3, shared=4 * LANES + 4)
    assert frame.registers["%d"].reshape(3, LANES).tolist() == [[k] * LANES for k in range(3)]
    assert set(frame.registers["%c"].tolist()) == {int.from_bytes(bytes([POISON] * 4), "little")}


def test_shared_memory_ends():
    registers = {"a": ("b32", [4 * k for k in range(LANES)]), "d": ("b32", None)}
    with pytest.raises(
        MemoryFault, match="thread 31 of program 0 accesses 4 bytes at 124 of shared memory, of which a program has 124"
    ):
        run("ld.shared.b32 %d, [%a];", LANES, registers, shared=124)


@pytest.mark.parametrize(
    "kind, register, size, count",
    [
        ("b8", "b16", 1, 1),
        ("b8", "b16", 1, 2),
        ("b8", "b16", 1, 4),
        ("b16", "b16", 2, 1),
        ("b16", "b32", 2, 1),
        ("b32", "b32", 4, 2),
        ("b32", "b32", 4, 4),
        ("b64", "b64", 8, 1),
        ("b64", "b64", 8, 2),
    ],
)
@pytest.mark.parametrize("space", ["shared", "global"])
def test_every_width_is_stored_and_loaded(kind, register, size, count, space):
    """Each thread's bytes hold its values in order, and are read back, filled with zeros."""
    _, region = room(LANES * size * count)
    values = {
        f"v{k}": [(0x0123456789ABCDEF * (j + 3) * (k + 1)) % (1 << int(register[1:])) for j in range(LANES)]
        for k in range(count)
    }
    begin, address = (region.begin, "b64") if space == "global" else (0, "b32")
    registers = {name: (register, column) for name, column in values.items()} | {
        f"w{k}": (register, None) for k in range(count)
    }
    registers["a"] = (address, [begin + size * count * k for k in range(LANES)])
    vector, back = ("{ " + ", ".join(f"%{letter}{k}" for k in range(count)) + " }" for letter in "vw")
    form = f"{space}.v{count}.{kind}" if count > 1 else f"{space}.{kind}"
    frame = run(
        f"st.{form} [ %a + 0 ], {vector};\nld.{form} {back}, [%a];",
        LANES,
        registers,
        shared=LANES * size * count,
        regions=[region],
    )
    expected = b"".join(
        (x % (1 << 8 * size)).to_bytes(size, "little") for row in zip(*values.values(), strict=True) for x in row
    )
    assert bytes((frame.memory if space == "global" else frame.shared).bytes[: len(expected)]) == expected
    for k in range(count):
        assert frame.registers[f"%w{k}"].tolist() == [x % (1 << 8 * size) for x in values[f"v{k}"]]


PARAMETERS = """.visible .entry k(
    .param .u64 .ptr .global .align 1 k_param_0, .param .u32 k_param_1, .param .f32 k_param_2,
    .param .align 8 .u64 k_param_3
)
.reqntid 32
{
.reg .b32 %r<4>; .reg .b64 %rd<4>;
ld.param.b64 %rd0, [k_param_0];
ld.param.s32 %rd1, [k_param_1];
ld.param.b32 %r0, [k_param_1];
ld.param.f32 %r1, [k_param_2];
ld.param.b32 %r2, [k_param_3];
ret;
}
"""


def test_parameters():
    program = Program(PARAMETERS)
    launch = Launch((1, 1, 1), (0x123456789A, -2, 0x3F800000, 7 << 32 | 5), Global([]))
    frame = Frame(program, launch, 0, 1)
    program.run_frame(frame)
    got = {name: frame.registers[name].tolist() for name in ("%rd0", "%rd1", "%r0", "%r1", "%r2")}
    wanted = {"%rd0": 0x123456789A, "%rd1": (1 << 64) - 2, "%r0": (1 << 32) - 2, "%r1": 0x3F800000, "%r2": 5}
    assert got == {name: [value] * 32 for name, value in wanted.items()}


def test_as_many_arguments_as_parameters():
    with pytest.raises(Unknown, match="the kernel k has 4 parameters, and was launched with 2 arguments"):
        Program(PARAMETERS).run(Launch((1, 1, 1), (0, 0), Global([])))


def test_a_grid_of_no_programs_does_nothing():
    Program(PARAMETERS).run(Launch((0, 1, 1), (0, 0, 0, 0), Global([])))


def test_a_kernel_without_memory_can_access_none():
    with pytest.raises(MemoryFault, match="outside every tensor that the kernel can know: it was given none"):
        run("ld.global.b32 %d, [%w];", 1, {"d": ("b32", [0]), "w": ("b64", [0])})
