"""Counts of small programs, each of which was counted by hand."""

import functools

import numpy as np
import pytest

from ptx.faults import Unknown
from ptx.forms import parsed
from ptx.machine import Launch, Program
from ptx.memory import Global, Region
from ptx.tests.corners.harness import MODULE
from ptx.watching.classes import class_of
from ptx.watching.counters import Counters, Line

NAMES = {"x": "b64", "y": "b64", **dict.fromkeys("abcd", "b32"), "p": "pred", "s": "b16", "f": "f32", "g": "f64"}
START = "mov.u32 %a, %tid.x;\nmov.u32 %b, %ctaid.x;\nmov.u64 %x, {address};\n"


def counted(body, threads=32, programs=1):
    """Run lines; %a is the thread, %b the program, and %x the address of 8 KiB, a multiple of 128."""
    array = np.zeros(8192 + 128, np.uint8)
    begin = -(-array.ctypes.data // 128) * 128
    registers = " ".join(f".reg .{kind} %{name};" for name, kind in NAMES.items())
    lines = START.format(address=begin) + body
    program = Program(MODULE.format(threads=threads, registers=registers, body=lines))
    found = []
    counters = functools.partial(Counters, found)
    memory = Global([Region(begin, begin + 8192, "x")])
    for _ in range(2):  # a launch is counted without those before it
        program.run(Launch((programs, 1, 1), (), memory, 4096, (counters(),)))
    assert vars(found[0]) == vars(found[1])
    return found[0]


def test_instructions_are_counted_by_their_names_and_classes():
    found = counted(
        "setp.lt.u32 %p, %a, 40;\n@!%p bra DONE;\nadd.s32 %c, %a, 1;\ncvt.rn.f32.u32 %f, %c;\nadd.rn.f32 %f, %f, %f;\n"
        "div.rn.f32 %f, %f, %f;\n@%p mul.lo.s32 %c, %c, 3;\ncvt.f64.f32 %g, %f;\nmul.rn.f64 %g, %g, %g;\n"
        "DONE:\nshfl.sync.bfly.b32 %d, %a, 1, 31, -1;\nbar.sync 0;",
        threads=64, programs=3,
    )  # fmt: skip
    every, some = (192, 6), (120, 6)  # of 64 threads 40: all of the first warp, and eight of the second
    assert (found.kernel, found.programs, found.threads) == ("tried", 3, 64)
    assert found.instructions == {
        "mov.u32": (384, 12), "mov.u64": every, "setp.lt.u32": every, "bra": every, "bar.sync": every, "ret": every,
        "add.s32": some, "cvt.rn.f32.u32": some, "add.rn.f32": some, "div.rn.f32": some, "mul.lo.s32": some,
        "cvt.f64.f32": some, "mul.rn.f64": some, "shfl.sync.bfly.b32": every,
    }  # fmt: skip
    assert found.by_class() == {
        "move": (576, 18), "integer": (432, 18), "control": (576, 18), "conversion": (240, 12), "float": some,
        "special": some, "fp64": some, "warp": every,
    }  # fmt: skip


def test_a_warp_counts_where_a_guard_holds_for_none_of_its_threads():
    found = counted("setp.gt.u32 %p, %a, 99;\n@%p add.s32 %c, %a, 1;\n@%p ld.global.b32 %d, [%x];")
    assert found.instructions["add.s32"] == found.instructions["ld.global.b32"] == (32, 1)
    assert not found.requested and not found.bytes


@pytest.mark.parametrize(
    "lines, sectors, width",
    [
        ("mad.wide.u32 %y, %a, 4, %x;\nld.global.b32 %c, [%y];", 4, 4),
        ("mad.wide.u32 %y, %a, 4, %x;\nld.global.b32 %c, [%y+4];", 5, 4),  # begins in the middle of a sector
        ("mad.wide.u32 %y, %a, 2, %x;\nld.global.b16 %s, [%y+2];", 3, 2),
        ("mad.wide.u32 %y, %a, 16, %x;\nld.global.v4.b32 {%a, %b, %c, %d}, [%y];", 16, 16),
        ("mad.wide.u32 %y, %a, 16, %x;\nld.global.b32 %c, [%y];", 16, 4),  # a quarter of each sixteen bytes
        ("mad.wide.u32 %y, %a, 64, %x;\nld.global.b32 %c, [%y];", 32, 4),
        ("ld.global.b32 %c, [%x];", 1, 4),
    ],
)
def test_sectors_that_a_warp_reads(lines, sectors, width):
    found = counted(lines)
    assert found.requested == found.fetched == found.distinct == {"read": sectors}
    assert found.bytes == {"read": 32 * width}


def test_sectors_are_requested_by_instructions_fetched_by_programs_and_distinct_in_a_launch():
    """Two programs of two warps; each warp reads the first 128 bytes twice, and 32 bytes of its own program."""
    lines = "mad.wide.u32 %y, %b, 32, %x;\nand.b32 %c, %a, 31;\nmad.wide.u32 %x, %c, 4, %x;\n"
    found = counted(lines + "ld.global.b32 %c, [%x];\n" * 2 + "ld.global.b32 %d, [%y+1024];", 64, 2)
    assert found.requested["read"] == 2 * 2 * (2 * 4 + 1)
    assert found.fetched["read"] == 2 * (4 + 1)
    assert found.distinct["read"] == 4 + 2
    assert found.bytes["read"] == 2 * 64 * 12


def test_stores_write_and_atomic_operations_read_and_write():
    found = counted(
        "mad.wide.u32 %y, %a, 4, %x;\nst.global.b32 [%y], %a;\natom.global.gpu.relaxed.add.u32 %c, [%y], 1;"
    )
    assert found.requested == {"write": 8, "read": 4} and found.distinct == {"write": 4, "read": 4}
    assert found.bytes == {"write": 256, "read": 128}


@pytest.mark.parametrize(
    "stride, access, wavefronts, conflicts",
    [
        (4, "st.shared.b32 [%c], %a", 1, 0),
        (0, "ld.shared.b32 %d, [%c]", 1, 0),  # one word, for all
        (8, "st.shared.b32 [%c], %a", 2, 1),
        (12, "st.shared.b32 [%c], %a", 1, 0),
        (128, "st.shared.b32 [%c], %a", 32, 31),
        (1, "st.shared.b8 [%c], %a", 1, 0),
        (8, "st.shared.b64 [%c], %x", 2, 0),
        (16, "st.shared.v4.b32 [%c], {%a, %a, %a, %a}", 4, 0),
        (32, "st.shared.v4.b32 [%c], {%a, %a, %a, %a}", 8, 4),
    ],
)
def test_wavefronts_of_shared_memory(stride, access, wavefronts, conflicts):
    found = counted(f"mul.lo.s32 %c, %a, {stride};\n{access};")
    assert (found.wavefronts, found.conflicts) == (wavefronts, conflicts)
    assert not found.requested


@pytest.mark.parametrize("line", ["tcgen05.mma.f32 %r, %r", "add.e4m3 %r, %r, %r", "ld.const.b32 %r, [%rd]"])
def test_an_instruction_without_a_class_is_named(line):
    instruction, _ = parsed(line)
    with pytest.raises(Unknown, match=f"`{line.split()[0]}.*the executor knows no class of such an instruction"):
        class_of(instruction)


def test_each_line_has_what_its_instruction_took():
    found = counted(
        "setp.lt.u32 %p, %a, 8;\nmad.wide.u32 %y, %a, 4, %x;\n@%p ld.global.b32 %c, [%y];\n"
        "st.global.v2.b32 [%x], {%a, %b};\nmov.u64 %y, room;\nst.shared.b32 [%y], %a;",
        threads=64,
    )  # fmt: skip
    taken = {found.ptx.split("\n")[line - 1].split(" ")[0]: each for line, each in found.lines.items()}
    assert taken["mad.wide.u32"] == Line(2)
    assert taken["@%p"] == Line(2, read=1)  # eight threads of the first warp
    assert taken["st.global.v2.b32"] == Line(2, written=2)
    assert taken["st.shared.b32"] == Line(2, wavefronts=2)
    assert found.shared == 4096
