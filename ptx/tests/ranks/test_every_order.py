"""All orders within a bound, without those that differ in nothing, have the outcomes of all orders one by one."""

import random

import pytest

from ptx.faults import DeadlockFault
from ptx.ranks import Order, every
from ptx.tests.ranks.harness import Memory, run


class Plain(Order):
    """An order that begins with given choices: nothing is known of what others have shown."""

    def __init__(self, begin, left):
        super().__init__()
        self.begin, self.left, self.others = begin, left, []

    def _choose(self, able, current, state):
        place, first = len(self.choices), able.index(current) if current in able else 0
        if place < len(self.begin):
            return self.begin[place]
        left = self.left - (current in able)
        if left >= 0:
            self.others += [((*self.choices, other), left) for other in range(len(able)) if other != first]
        return first


def one_by_one(preemptions):
    left = [((), preemptions)]
    while left:
        order = Plain(*left.pop())
        yield order
        left += order.others


STATEMENTS = (
    "atom.acq_rel.sys.global.add.u32 %d, [%x+{at}], 1;\nshl.b32 %e, %e, 3;\nadd.u32 %e, %e, %d;\n",
    "ld.acquire.sys.global.b32 %d, [%x+{at}];\nshl.b32 %e, %e, 3;\nadd.u32 %e, %e, %d;\n",
    "fence.acq_rel.sys;\nst.release.sys.global.b32 [%x+{at}], %c;\n",
    "WAIT{label}: ld.acquire.sys.global.b32 %d, [%x+{at}];\nsetp.eq.u32 %p, %d, 0;\n@%p bra WAIT{label};\n",
)
ALONE = "setp.ne.u32 %q, %t, 0;\n@%q ret;\nmov.u32 %e, 0;\nadd.u32 %c, %g, {rank};\nmad.wide.u32 %w, %g, 4, %w;\n"


def programs(draw, ranks, length):
    """Statements on two words; in the end each program adds to one of them and stores what it has found."""
    bodies = []
    for rank in range(ranks):
        chosen = [draw.choice(STATEMENTS[: 3 if place == 0 else 4]) for place in range(length)]
        last = "atom.release.sys.global.add.u32 %d, [%x], 1;\nst.global.b32 [%w], %e;\n"
        lines = [each.format(at=4 * draw.randrange(2), label=place) for place, each in enumerate(chosen)]
        bodies.append(ALONE.format(rank=1 + rank) + "".join(lines) + last)
    return bodies


def outcomes(orders, bodies, count):
    found = []
    for order in orders:
        memory = Memory(len(bodies))
        start = f"mov.u64 %x, {memory.data[0].data_ptr() + 256};\n"
        try:
            run(*(start + each for each in bodies), programs=count, memory=memory, order=order)
            found.append(str([each.tolist() for each in memory.data]))
        except DeadlockFault:
            found.append("a wait that never ends")
    return found


def compared(seed, ranks, count, length, bound):
    bodies = programs(random.Random(seed), ranks, length)
    plain, bounded = outcomes(one_by_one(bound), bodies, count), outcomes(every(bound), bodies, count)
    assert {*plain} == {*bounded}, (seed, ranks, count, length, bound)
    return len(plain), len(bounded), len({*plain})


def test_outcomes_are_those_of_all_orders():
    counts = [compared(seed, 2, 1, 3, bound) for seed in range(2) for bound in (0, 1, 2)]
    assert max(different for _, _, different in counts) > 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks, count, length, bound", [(2, 1, 4, 2), (3, 1, 2, 2), (2, 2, 2, 1), (3, 1, 3, 1)])
def test_outcomes_are_those_of_all_orders_in_many_programs(ranks, count, length, bound):
    for seed in range(100, 106):
        compared(seed, ranks, count, length, bound)
