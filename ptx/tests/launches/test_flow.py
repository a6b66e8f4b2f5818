"""Threads that diverge run each its own path, and together again after it; barriers that cannot be met are named."""

import pytest

from ptx import machine
from ptx.faults import DivergenceFault, EndlessLoop, Unknown
from ptx.machine import Program
from ptx.tests.corners.harness import run

LANES = 32


def registers(*names, **given):
    return dict.fromkeys(names, ("b32", None)) | given


def test_two_sides_of_a_branch():
    lines = """
    mov.u32 %a, %tid.x;
    setp.lt.u32 %p, %a, 10;
    @%p bra LEFT;
    mov.u32 %d, 100;
    bra.uni JOIN;
    LEFT: mov.u32 %d, 200;
    JOIN: add.u32 %d, %d, %a;
    """
    frame = run(lines, LANES, registers("a", "d", p=("pred", None)))
    assert frame.registers["%d"].tolist() == [(200 if k < 10 else 100) + k for k in range(LANES)]


def test_a_loop_whose_turns_differ():
    """Thread k adds up 1 to k."""
    lines = """
    mov.u32 %a, %tid.x;
    mov.u32 %d, 0;
    LOOP: setp.eq.u32 %p, %a, 0;
    @%p bra DONE;
    add.u32 %d, %d, %a;
    sub.u32 %a, %a, 1;
    bra LOOP;
    DONE: mov.u32 %b, 1;
    """
    frame = run(lines, LANES, registers("a", "b", "d", p=("pred", None)))
    assert frame.registers["%d"].tolist() == [k * (k + 1) // 2 for k in range(LANES)]


def collatz(n):
    steps = 0
    while n != 1:
        n, steps = (3 * n + 1 if n % 2 else n // 2), steps + 1
    return steps


COLLATZ = """
    mov.u32 %a, %tid.x;
    add.u32 %a, %a, 1;
    mov.u32 %d, 0;
    HEAD: setp.eq.u32 %p, %a, 1;
    @%p bra DONE;
    add.u32 %d, %d, 1;
    and.b32 %b, %a, 1;
    setp.eq.u32 %p, %b, 1;
    @%p bra ODD;
    shr.u32 %a, %a, 1;
    bra HEAD;
    ODD: mad.lo.u32 %a, %a, 3, 1;
    bra HEAD;
    DONE: shfl.sync.bfly.b32 %c, %d, 1, 31, -1;
"""


def test_a_loop_with_a_branch_in_it_and_a_shuffle_behind():
    frame = run(COLLATZ, 64, registers("a", "b", "c", "d", p=("pred", None)))
    assert frame.registers["%d"].tolist() == [collatz(k + 1) for k in range(64)]
    assert frame.registers["%c"].tolist() == [collatz((k ^ 1) + 1) for k in range(64)]


def test_the_order_of_the_text_decides_nothing():
    """A side that stands behind the end of the kernel still comes back before the shuffle is done."""
    lines = """
    mov.u32 %a, %tid.x;
    setp.lt.u32 %p, %a, 5;
    mov.u32 %d, 1;
    @%p bra COLD;
    JOIN: shfl.sync.idx.b32 %c, %d, 0, 31, -1;
    ret;
    COLD: mov.u32 %d, 2;
    bra JOIN;
    """
    frame = run(lines, LANES, registers("a", "c", "d", p=("pred", None)))
    assert frame.registers["%c"].tolist() == [2] * LANES


def test_some_return_early():
    lines = "mov.u32 %d, 1;\nmov.u32 %a, %tid.x;\nsetp.gt.u32 %p, %a, 3;\n@%p ret;\nmov.u32 %d, 2;"
    frame = run(lines, LANES, registers("a", "d", p=("pred", None)))
    assert frame.registers["%d"].tolist() == [2] * 4 + [1] * 28


def test_threads_that_met_again_execute_together():
    """Blocks behind a branch and a loop are executed once by all, not once by each group."""
    text = "\n".join(
        [".visible .entry k()", ".reqntid 32", "{", ".reg .pred %p;", ".reg .b32 %a, %b, %c, %d;", COLLATZ, "ret;", "}"]
    )
    program = Program(text)
    program.run(machine.Launch((1, 1, 1), (), machine.Global([])))
    last = next(rank for rank, block in enumerate(program.blocks) if block.waits)
    assert program.executed[last].tolist() == [32, 1]
    head = next(
        k
        for k, block in enumerate(program.blocks)
        if block.instructions and block.instructions[0].text.startswith("setp.eq.u32 %p, %a, 1")
    )
    assert program.executed[head][1] == 1 + max(collatz(k + 1) for k in range(32))


def test_a_barrier_that_some_do_not_reach():
    lines = "mov.u32 %a, %tid.x;\nsetp.eq.u32 %p, %a, 7;\n@%p bra OUT;\nbar.sync 0;\nOUT: mov.u32 %d, 1;"
    message = (
        "line 11 of the PTX, `bar.sync 0`: thread 0 of program 0 waits for other threads, which never come; 63 of 64"
    )
    with pytest.raises(DivergenceFault, match=message):
        run(lines, 64, registers("a", "d", p=("pred", None)))


def test_a_shuffle_that_some_do_not_reach():
    lines = "mov.u32 %a, %tid.x;\nsetp.ge.u32 %p, %a, 48;\n@%p ret;\nshfl.sync.bfly.b32 %d, %a, 1, 31, -1;"
    with pytest.raises(
        DivergenceFault, match=r"`shfl\.sync\.bfly\.b32 %d, %a, 1, 31, -1`: thread 32 of program 0 waits"
    ):
        run(lines, 64, registers("a", "d", p=("pred", None)))


def test_a_shuffle_of_those_that_its_mask_names():
    lines = (
        "mov.u32 %a, %tid.x;\nmov.u32 %d, 99;\nsetp.ge.u32 %p, %a, 8;\n@%p ret;\nshfl.sync.bfly.b32 %d, %a, 1, 31, 255;"
    )
    frame = run(lines, LANES, registers("a", "d", p=("pred", None)))
    assert frame.registers["%d"].tolist() == [k ^ 1 for k in range(8)] + [99] * 24


def test_two_sides_may_each_have_their_own_vote():
    lines = """
    mov.u32 %a, %tid.x;
    setp.lt.u32 %p, %a, 4;
    setp.ne.u32 %q, %a, 2;
    @%p bra FEW;
    vote.sync.ballot.b32 %d, %q, 0xfffffff0;
    bra DONE;
    FEW: vote.sync.ballot.b32 %d, %q, 15;
    DONE: bar.warp.sync -1;
    """
    frame = run(lines, LANES, registers("a", "d", p=("pred", None), q=("pred", None)))
    assert frame.registers["%d"].tolist() == [0b1011] * 4 + [0xFFFFFFF0] * 28


def test_barriers_order_what_warps_do():
    """A warp that comes late has stored before the others load."""
    lines = """
    mov.u32 %a, %tid.x;
    shl.b32 %b, %a, 2;
    setp.lt.u32 %p, %a, 32;
    @!%p bra STORED;
    mov.u32 %c, 50;
    TURN: sub.u32 %c, %c, 1;
    setp.ne.u32 %q, %c, 0;
    @%q bra TURN;
    STORED: st.shared.b32 [%b], %a;
    bar.sync 0;
    xor.b32 %b, %b, 128;
    ld.shared.b32 %d, [%b];
    """
    frame = run(lines, 64, registers("a", "b", "c", "d", p=("pred", None), q=("pred", None)), shared=256)
    assert frame.registers["%d"].tolist() == [k ^ 32 for k in range(64)]


def test_a_kernel_that_never_ends(monkeypatch):
    monkeypatch.setattr(machine, "LIMIT", 100)
    with pytest.raises(EndlessLoop, match="has run 100 blocks and not ended"):
        run("LOOP: mov.u32 %a, 1;\nbra LOOP;", LANES, registers("a"))


@pytest.mark.parametrize(
    "line", ["bra NOWHERE", "bra.div HERE", "@%p bar.sync 0", "bar.sync 1", "bar.arrive 0, 32", "call f"]
)
def test_unknown_jumps_and_barriers_are_named(line):
    with pytest.raises(Unknown, match="line 8 of the PTX"):
        run(f"HERE: {line};", LANES, {"p": ("pred", None)})
