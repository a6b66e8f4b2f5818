"""Races and reads of what nobody wrote, planted in a few lines; and the same lines with what mends them."""

import numpy as np
import pytest
import torch

from ptx.faults import RaceFault, UnwrittenFault
from ptx.memory import Region
from ptx.tests.corners.harness import run
from ptx.watching import Fresh, Races, Unwritten


def watched(body, threads=64, programs=1, shared=256, watcher=Races):
    """Run lines under a watcher; %x is the address of 16 bytes for each thread, %p and %q are predicates."""
    array = np.zeros(16 * threads * programs + 16, np.uint8)
    region = Region(array.ctypes.data, array.ctypes.data + len(array), "x")
    lanes = range(threads * programs)
    registers = {"x": ("b64", [region.begin] * len(lanes)), "p": ("pred", None), "q": ("pred", None)}
    registers |= dict.fromkeys("abcd", ("b32", None)) | {"y": ("b64", None)}
    watching = watcher()
    start = "mov.u32 %a, %tid.x;\nmov.u32 %b, %ctaid.x;\nshl.b32 %c, %a, 2;\nmad.wide.u32 %y, %a, 4, %x;\n"
    run(start + body, threads, registers, programs, shared, [region], (watching,))
    watching.ended()


EXCHANGE = "st.shared.b32 [%c], %a;\n{barrier}xor.b32 %c, %c, {far};\nld.shared.b32 %d, [%c];"


def test_warps_exchange_behind_a_barrier():
    watched(EXCHANGE.format(barrier="bar.sync 0;\n", far=128))
    message = r"`st.shared.b32 \[%c\], %a` by thread .* of program 0 and .*`ld.shared.b32 %d, \[%c\]` by"
    for barrier in ("", "bar.warp.sync -1;\n"):
        with pytest.raises(RaceFault, match=message):
            watched(EXCHANGE.format(barrier=barrier, far=128))


def test_threads_of_a_warp_exchange_behind_a_barrier_of_the_warp():
    for barrier in ("bar.sync 0;\n", "bar.warp.sync -1;\n"):
        watched(EXCHANGE.format(barrier=barrier, far=4))
    with pytest.raises(RaceFault, match="access byte 0x0 of shared memory"):
        watched(EXCHANGE.format(barrier="", far=4))


def test_what_was_read_is_written_behind_a_barrier():
    lines = "st.shared.b32 [%c], %a;\nbar.sync 0;\nld.shared.b32 %d, [{at}];\n{barrier}st.shared.b32 [%c], %d;"
    watched(lines.format(at="%c", barrier=""))
    watched(lines.format(at="room", barrier="bar.sync 0;\n"))
    with pytest.raises(RaceFault):
        watched(lines.format(at="room", barrier=""))


OVERLAP = """
    mad.wide.u32 %y, %a, 3, %x;
    setp.eq.u32 %p, %a, 0;
    setp.eq.u32 %q, %a, 36;
    @%q st.global.b32 [%y+-96], %a;
    @%p st.global.v4.b32 [%x], {%a, %a, %a, %a};
"""


def test_two_threads_store_one_byte():
    watched("st.global.b32 [%y], %a;")
    with pytest.raises(RaceFault, match=r"thread 0 of program 0 and .* by thread 32 of program 0 access byte"):
        watched("st.global.b32 [%x], %a;")
    with pytest.raises(RaceFault):  # the last byte of one is the first of the next
        watched(OVERLAP)


def test_those_that_store_the_same_do_not_race():
    watched("mov.u32 %d, 5;\nst.global.b32 [%x], %d;")


def test_a_warp_that_adds_one():
    """All load, and the first stores: ordered by a barrier, or else by GPUs' running the threads of a warp together."""
    lines = "ld.global.b32 %d, [%x];\nadd.u32 %d, %d, 1;\nsetp.eq.u32 %p, %a, 0;\n@%p st.global.b32 [%x], %d;"
    watched(lines, threads=32, watcher=lambda: Races(strict=False))
    watched(lines.replace("add.u32", "bar.sync 0;\nadd.u32"), threads=32)
    with pytest.raises(RaceFault):
        watched(lines, threads=32)
    with pytest.raises(RaceFault):  # another warp may load what the first has stored
        watched(lines, threads=64, watcher=lambda: Races(strict=False))


def test_programs_are_not_ordered_by_anything():
    watched("st.global.b32 [%y], %a;", programs=1)
    with pytest.raises(RaceFault, match=r"of program 0 and .* of program 1 access byte"):
        watched("add.u32 %a, %a, %b;\nst.global.b32 [%y], %a;", programs=2)
    lines = "setp.eq.u32 %p, %b, 0;\n@%p st.global.b32 [%y], %a;\nbar.sync 0;\n@!%p ld.global.b32 %d, [%y];"
    with pytest.raises(RaceFault, match=r"by thread 0 of program 0 and .* by thread 0 of program 1"):
        watched(lines, programs=2)


def test_atomic_operations_do_not_race_with_one_another():
    watched("atom.global.add.u32 %d, [%x], %a;", programs=2)
    with pytest.raises(RaceFault):
        watched("atom.global.add.u32 %d, [%x], %a;\nld.global.b32 %d, [%x];", programs=2)


def test_a_program_has_shared_memory_of_its_own():
    watched(EXCHANGE.format(barrier="bar.sync 0;\n", far=128), programs=3)


def test_shared_memory_must_be_written_before_it_is_read():
    watched("st.shared.b32 [%c], %a;\nbar.sync 0;\nld.shared.b32 %d, [%c];", watcher=Unwritten)
    lines = "setp.ne.u32 %p, %a, 9;\n@%p st.shared.b32 [%c], %a;\nbar.sync 0;\nld.shared.b32 %d, [%c];"
    message = (
        r"`ld.shared.b32 %d, \[%c\]`: thread 9 of program 0 reads shared memory at 36, which nothing was written to"
    )
    with pytest.raises(UnwrittenFault, match=message):
        watched(lines, watcher=Unwritten)
    with pytest.raises(UnwrittenFault, match="reads shared memory at 0"):
        watched(
            "setp.ne.u32 %p, %b, 1;\n@%p st.shared.b32 [%c], %a;\nld.shared.b32 %d, [%c];",
            programs=2,
            watcher=Unwritten,
        )


# Global memory that nothing was written to. Kernels' stores are tried in tests/kernels/test_executed_faults.py.


def test_poison_is_not_a_number_and_does_not_repeat_itself():
    fresh = Fresh()
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.zeros(1001, dtype=dtype)
        fresh.poison(x)
        assert x.isnan().all()
    x = torch.zeros(8 * 1000, dtype=torch.uint8)
    fresh.poison(x)
    assert len(x.view(torch.int64).unique()) == 1000


def test_a_word_that_is_no_longer_poison_has_been_written():
    fresh, x = Fresh(), torch.zeros(30, dtype=torch.uint8)
    fresh.poison(x)
    assert fresh.watcher().unwritten.all()
    x[9] += 1
    x[24:] = 0
    assert np.flatnonzero(~fresh.watcher().unwritten).tolist() == [*range(8, 16), *range(24, 30)]
    x.zero_()
    assert fresh.watcher().pieces == []


def test_memory_that_was_freed_is_forgotten():
    fresh, x, y = Fresh(), torch.zeros(100), torch.zeros(100)
    fresh.poison(x)
    fresh.poison(y)
    view = x[3:]
    del x
    y.untyped_storage().resize_(0)
    assert [len(each.bytes) for each in fresh.watcher().pieces] == [400]  # a view keeps what it is a view of
    del view
    assert fresh.watcher().pieces == []
