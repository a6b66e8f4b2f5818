"""Orders of programs, waits that never end, and clocks."""

import pytest
import torch

from ptx.faults import DeadlockFault, DivergenceFault, MemoryFault
from ptx.ranks import drawn, every, running
from ptx.tests.ranks.harness import run, signal, wait


def test_an_order_can_be_repeated_and_seeds_draw_others():
    both = signal(1) + wait(1) + signal(2, 1) + wait(2, 1, "SECOND")
    ran = [run(both, both, order=order)[1].choices for order in [*drawn(20, 5), *drawn(20, 5)]]
    assert ran[:20] == ran[20:] and len({*ran}) > 10


def test_every_order_is_all_there_are():
    """Two programs each take a number twice: all six ways to interleave four atomic operations."""
    alone = "setp.ne.u32 %q, %t, 0;\n@%q ret;\nmad.wide.u32 %z, %g, 8, %z;\n"
    take = "atom.acq_rel.sys.global.add.u32 %d, [%x], 1;\n"
    body = alone + take + "st.global.b32 [%z], %d;\n" + take + "st.global.b32 [%z+4], %d;\n"
    found = {bound: [] for bound in range(4)}
    for bound, outcomes in found.items():
        for order in every(bound):
            memory, _ = run(body, programs=2, order=order)
            outcomes.append(tuple(memory.data[0][:4].tolist()))
    ways = {(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2), (1, 2, 0, 3), (1, 3, 0, 2), (2, 3, 0, 1)}
    assert {*found[0]} == {(0, 1, 2, 3), (2, 3, 0, 1)}
    assert {*found[2]} == {*found[3]} == ways
    assert len(found[0]) == 1 + 2  # the first showed that they are related


def tried(bound, *bodies, programs=1):
    return sum(1 for order in every(bound) if run(*bodies, programs=programs, order=order))


def test_orders_that_differ_in_independent_accesses_alone_are_one():
    """Programs that each write a word of their own; pairs of them that wait for one another; and all for all."""
    own = "mad.wide.u32 %y, %g, 4, %y;\nmad.wide.u32 %x, %g, 4, %x;\n"
    assert tried(2, own + signal(1), own + signal(1), programs=3) == 1
    pairs = [tried(2, *[own + signal(1) + wait(1)] * 2, programs=count) for count in (1, 2)]
    first = 1  # shows who is related
    assert pairs == [first + count * (pairs[0] - first - 1) + 1 for count in (1, 2)]
    assert tried(2, *[own + "ld.acquire.sys.global.b32 %a, [%x+8];\n"] * 2, programs=2) == 1  # nobody writes there


def test_a_deadlock_names_who_waits_for_which_word():
    message = (
        r"tried: program 0 of rank 0 waits for byte 0 of pad of rank 0, which is unwritten, at line \d+ of the PTX, "
        r"`ld\.acquire\.sys\.global\.b32 %a, \[%x\+0\]`; tried: program 0 of rank 1 waits for byte 4 of pad of rank 1, "
        r"which is 1, at .*: no program is left that could write there"
    )
    for order in [*drawn(10), *every(1)]:
        with pytest.raises(DeadlockFault, match=message):
            run(signal(1, 1) + wait(1), wait(2, 1), order=order)


def test_a_wait_for_a_program_that_has_ended_is_a_deadlock():
    for order in drawn(6):
        with pytest.raises(DeadlockFault, match="program 0 of rank 1 waits for byte 0 of pad of rank 1"):
            run("mov.u32 %d, 0;\n", wait(1), order=order)


def test_programs_that_wait_for_one_that_is_not_resident():
    """Program 1 signals program 0 of its rank; where one runs at a time, it never begins."""
    body = "setp.eq.u32 %q, %g, 1;\n@%q bra OTHER;\n" + wait(1) + "ret;\nOTHER: " + signal(1)
    run(body, programs=2)
    run(body, programs=2, resident=2)
    with pytest.raises(DeadlockFault, match="program 0 waits for"):
        run(body, programs=2, resident=1)


COUNTED = (
    "mov.u32 %e, 0;\nMORE: add.u32 %e, %e, 1;\nsetp.gt.u32 %q, %e, {most};\n@%q bra DONE;\n{wait}DONE: mov.u32 %d, 0;\n"
)


def test_a_wait_that_counts_may_end_by_itself(monkeypatch):
    monkeypatch.setattr(running, "IDLE", 200)
    waiting = wait(1).replace("@%p bra WAIT", "@%p bra MORE")
    for order in drawn(4):
        run(COUNTED.format(most=50, wait=waiting), "mov.u32 %d, 0;\n", order=order)
    with pytest.raises(DeadlockFault):
        run(COUNTED.format(most=210, wait=waiting), "mov.u32 %d, 0;\n")


TIMED = """mov.u64 %w, %globaltimer;
AGAIN: ld.acquire.sys.global.b32 %a, [%x];
mov.u64 %y, %globaltimer;
sub.u64 %y, %y, %w;
setp.gt.u64 %q, %y, {limit};
@%q bra LATE;
setp.ne.u32 %p, %a, 1;
@%p bra AGAIN;
ret;
LATE: st.global.b32 [%z], %a;
mov.u32 %d, 1;
st.global.b32 [%z+128], %d;
"""


def test_a_time_limit_is_reached_where_the_wait_would_never_end_and_nowhere_else():
    limit = 10_000_000_000
    for order in drawn(10):
        memory, _ = run(TIMED.format(limit=limit), "nanosleep.u32 100;\n" + signal(1), order=order)
        assert memory.data[0].sum() == 0
        memory, _ = run(TIMED.format(limit=limit), "mov.u32 %d, 0;\n", order=order.__class__(order.seed))
        assert memory.data[0][32] == 1
    with pytest.raises(DeadlockFault):
        run(TIMED.format(limit=9_000_000_000_000_000_000), "mov.u32 %d, 0;\n")


def test_threads_that_never_meet_are_named_with_their_rank():
    body = "setp.eq.u32 %p, %t, 3;\n@%p bra OUT;\nbar.sync 0;\nOUT: " + signal(1)
    with pytest.raises(DivergenceFault, match="thread 0 of program 0 of rank 0 waits for other threads"):
        run(body, wait(1), threads=64)


def test_memory_that_nobody_was_given_is_named_with_the_rank():
    with pytest.raises(MemoryFault, match="program 0 of rank 1 accesses"):
        run(signal(1), "mov.u64 %w, 4096;\nst.global.b32 [%w], %t;\n")


def test_a_step_over_the_end_of_a_part_of_symmetric_memory():
    with pytest.raises(MemoryFault):
        run("ld.global.v2.b32 {%a, %b}, [%z+508];\n")
    memory, _ = run("ld.global.v2.b32 {%a, %b}, [%z+504];\n")
    assert torch.equal(memory.data[0], torch.zeros(128, dtype=torch.int32))
