"""Clocks find a race where the manual's definition does, in programs that were drawn."""

import random

import pytest

from ptx.ranks import drawn
from ptx.ranks.orders import Drawn
from ptx.tests.ranks.harness import Memory, run
from ptx.tests.ranks.relation import Operation, Recorder, races

ALONE = "setp.ne.u32 %q, %t, {thread};\n@%q bra AFTER{label};\n{lines}AFTER{label}: mov.u32 %d, 0;\n"
SIGNALS, WORDS, ATOMIC = 2, 6, ("relaxed", "acquire", "release", "acq_rel")


def statement(draw, label):
    """A line for all threads, or for one."""
    word, data = 4 * draw.randrange(SIGNALS), 4 * draw.randrange(SIGNALS, WORDS)
    scope = draw.choice(["sys", "sys", "sys", "sys", "gpu", "cta"])
    line = draw.choice(
        [
            *["bar.sync 0;\n"] * 3,
            *[f"fence.acq_rel.{scope};\n"] * 2,
            f"ld.global.b32 %a, [%x+{data}];\n",
            f"st.global.b32 [%x+{draw.choice((word, data, data, data))}], %c;\n",
            f"ld.relaxed.{scope}.global.b32 %a, [%x+{word}];\n",
            f"st.relaxed.{scope}.global.b32 [%x+{word}], %c;\n",
            *[f"ld.acquire.{scope}.global.b32 %a, [%x+{word}];\n"] * 4,
            *[f"st.release.{scope}.global.b32 [%x+{word}], %c;\n"] * 4,
            f"atom.{draw.choice(ATOMIC)}.{scope}.global.add.u32 %a, [%x+{word}], 1;\n",
        ]
    )
    if line.startswith("bar"):
        return line
    value = f"mov.u32 %c, {label + 1000 * draw.randrange(1, 1000)};\n"
    return ALONE.format(thread=draw.randrange(2), label=label, lines=value + line)


def program(draw, length):
    return "".join(statement(draw, label) for label in range(length))


def judged(seed, ranks, programs, length):
    """Run a program of each rank in an order; return whether clocks and the definition find a race."""
    draw, memory = random.Random(seed), Memory(ranks)
    bodies = [f"mov.u64 %x, {memory.data[0].data_ptr()};\n" + program(draw, length) for _ in range(ranks)]
    found, recorder = [], Recorder()
    run(
        *bodies,
        threads=2,
        programs=programs,
        memory=memory,
        order=Drawn(seed),
        watchers=(lambda: recorder,),
        found=found,
    )
    return bool(found), races(recorder.operations)


@pytest.mark.parametrize("ranks, programs, length", [(2, 1, 6), (3, 1, 3), (1, 3, 4), (2, 2, 3)])
def test_clocks_equal_the_definition(ranks, programs, length):
    verdicts = [judged(seed, ranks, programs, length) for seed in range(30)]
    assert [clocks for clocks, _ in verdicts] == [defined for _, defined in verdicts]
    assert {*verdicts} == {(False, False), (True, True)}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks, programs, length", [(2, 1, 8), (3, 1, 6), (1, 3, 6), (2, 2, 4)])
def test_clocks_equal_the_definition_in_many_programs(ranks, programs, length):
    for seed in range(1000, 1500):
        clocks, defined = judged(seed, ranks, programs, length)
        assert clocks == defined, seed


def test_a_scope_must_include_each_that_has_released_what_a_read_finds():
    """An atomic operation of the CTA passes on what another rank has released: a read of scope .cta does not get it."""
    assert judged(1361, 2, 1, 8) == (True, True)


def test_the_definition_knows_the_message_that_is_passed():
    """Data, a release, an acquire, data; and the same with a relaxed read."""
    data, put = Operation((0, 0, 0), "write", place=1), Operation((0, 0, 0), "write", "release", 4, 2)
    for order, racing in (("acquire", False), ("relaxed", True)):
        get = Operation((1, 0, 0), "read", order, 4, 2, put)
        assert races([data, put, get, Operation((1, 0, 0), "read", place=1, source=data)]) == racing
    assert [each.seed for each in drawn(2, 3)] == [3, 4]
