"""Accesses of two ranks that are ordered, and others that are not: PTX ISA, chapter 8, in a few lines each."""

import pytest
import torch

from ptx.faults import OwnerFault, RaceFault, SignalFault, Unknown, UnwrittenFault
from ptx.ranks import drawn
from ptx.tests.ranks.harness import Memory, run, signal, wait
from ptx.watching import WATCHERS, Fresh
from ptx.watching.counters import Counters

ORDERS = 5
STORE = "mad.wide.u32 %w, %t, 4, %w;\nst.global.b32 [%w], %t;\n"  # thread t: word t of the peer's data
LOAD = "mad.wide.u32 %z, %t, 4, %z;\nld.global.b32 %d, [%z];\n"  # of the rank's own
BAR = "bar.sync 0;\n"


def in_all(*bodies, **options):
    for order in drawn(ORDERS):
        memory, _ = run(*bodies, order=order, **options)
    return memory


def found_in_all(fault, match, *bodies, **options):
    """Every order finds it."""
    for order in drawn(ORDERS):
        with pytest.raises(fault, match=match):
            run(*bodies, order=order, **options)


def test_a_release_and_an_acquire_order_what_barriers_of_programs_join():
    memory = in_all(STORE + BAR + signal(1), wait(1) + BAR + LOAD, threads=64)
    assert torch.equal(memory.data[1][:64], torch.arange(64, dtype=torch.int32))


RACE = r"tried, line \d+ of the PTX, `st.global.b32 \[%w\], %t` by thread \d+ of program 0 of rank 0 and tried, line "
RACE += (
    r"\d+ of the PTX, `ld.global.b32 %d, \[%z\]` by thread \d+ of program 0 of rank 1 access byte \d+ of data of rank 1"
)


@pytest.mark.parametrize(
    "first, second",
    [
        (STORE + signal(1), wait(1) + BAR + LOAD),  # a signal of one thread overtakes the others' data
        (BAR + signal(1) + STORE, wait(1) + BAR + LOAD),  # a signal before the data
        (STORE + BAR + signal(1), LOAD + wait(1)),  # no wait before the read
    ],
)
def test_data_that_no_signal_orders(first, second):
    for order in drawn(ORDERS):
        with pytest.raises(RaceFault, match=r"of rank [01] and .* of rank [01] access byte \d+ of data of rank 1"):
            run(first, second, order=order, threads=64)


def test_a_race_names_kernels_lines_threads_and_bytes():
    with pytest.raises(RaceFault, match=RACE):
        run(STORE + signal(1), wait(1) + BAR + LOAD)


ALONE = "setp.ne.u32 %q, %t, 0;\n@%q bra OUT;\n{lines}OUT: "


def test_a_wait_of_one_thread_orders_the_others_behind_a_barrier_alone():
    waiting = ALONE.format(lines=wait(1))
    in_all(STORE + BAR + signal(1), waiting + BAR + LOAD, threads=64)
    found_in_all(RaceFault, "by thread [1-9]", STORE + BAR + signal(1), waiting + LOAD, threads=64)


def test_a_signal_of_one_thread_orders_its_own_data_without_a_barrier():
    alone = "setp.ne.u32 %q, %t, 0;\n@%q bra OUT;\n{}OUT: mov.u32 %d, 0;\n"
    in_all(alone.format(STORE + signal(1)), alone.format(wait(1) + LOAD))
    found_in_all(
        RaceFault, r"by thread 0 .* by thread 0", alone.format(signal(1) + STORE), alone.format(wait(1) + LOAD)
    )


def test_a_signal_that_several_threads_write_has_what_all_of_them_know():
    """Rank 0 stores and signals; of rank 1 one thread waits, and all signal rank 2, which reads."""
    relay = ALONE.format(lines=wait(1)) + "{}" + signal(1)
    for order in drawn(ORDERS):
        memory = Memory(3)
        read = f"mov.u64 %z, {memory.data[1].data_ptr()};\n" + wait(1) + BAR + LOAD
        run(STORE + BAR + signal(1), relay.format(BAR), read, order=order, memory=memory)
        memory = Memory(3)
        read = f"mov.u64 %z, {memory.data[1].data_ptr()};\n" + wait(1) + BAR + LOAD
        with pytest.raises(RaceFault, match=r"of rank 0 and .* of rank 2"):
            run(STORE + BAR + signal(1), relay.format(""), read, order=order, memory=memory)


@pytest.mark.parametrize("scope", ["cta", "gpu"])
def test_a_signal_to_another_rank_has_the_scope_of_the_system(scope):
    message = rf"the access to byte 0 of pad of rank 1, a word of signals, by thread 0 .* has the scope \.{scope}, not"
    found_in_all(SignalFault, message, STORE + BAR + signal(1).replace("sys", scope), wait(1) + BAR + LOAD)
    found_in_all(SignalFault, "has the scope", STORE + BAR + signal(1), wait(1).replace("sys", scope) + BAR + LOAD)


def test_a_plain_access_to_a_signal_is_named():
    plain = signal(1).replace(".release.sys", "")
    found_in_all(SignalFault, "`st.global.b32 .*byte 0 of pad of rank 1.* is plain", STORE + BAR + plain, wait(1))
    found_in_all(SignalFault, "`ld.global.b32 .* is plain", signal(1), wait(1).replace(".acquire.sys", ""))


RELAXED = signal(1).replace("release", "relaxed"), wait(1).replace("acquire", "relaxed")
VOLATILE = signal(1).replace("release.sys", "volatile"), wait(1).replace("acquire.sys", "volatile")


@pytest.mark.parametrize("put, get", [RELAXED, VOLATILE])
def test_a_relaxed_signal_orders_nothing(put, get):
    message = "releases nothing: it is relaxed, and behind no fence"
    found_in_all(SignalFault, message, STORE + BAR + put, wait(1) + BAR + LOAD)
    found_in_all(SignalFault, "without .acquire, and no fence follows", STORE + BAR + signal(1), get + BAR + LOAD)


@pytest.mark.parametrize("fence", ["fence.acq_rel.sys;\n", "fence.sc.sys;\n", "membar.sys;\n"])
@pytest.mark.parametrize("put, get", [RELAXED, VOLATILE])
def test_a_fence_and_a_relaxed_access_order(put, get, fence):
    in_all(STORE + BAR + fence + put, get + fence + BAR + LOAD)
    in_all(STORE + BAR + signal(1), get + fence + BAR + LOAD)
    in_all(STORE + BAR + fence + put, wait(1) + BAR + LOAD)


@pytest.mark.parametrize("fence", ["fence.acq_rel.gpu;\n", "fence.sc.cta;\n", "membar.gl;\n"])
def test_a_fence_of_a_narrower_scope_orders_nothing_between_ranks(fence):
    found_in_all(
        (RaceFault, SignalFault), None, STORE + BAR + fence + RELAXED[0], RELAXED[1] + "membar.sys;\n" + BAR + LOAD
    )
    found_in_all(
        (RaceFault, SignalFault), None, STORE + BAR + "membar.sys;\n" + RELAXED[0], RELAXED[1] + fence + BAR + LOAD
    )


def test_a_fence_before_the_data_orders_none_of_it():
    found_in_all(RaceFault, None, "membar.sys;\n" + STORE + BAR + RELAXED[0], wait(1) + BAR + LOAD)


# Atomic operations.

PUT = "PUT: atom.global.release.sys.cas.b32 %a, [%y], 0, 1;\nsetp.ne.u32 %p, %a, 0;\n@%p bra PUT;\n"
GET = "GET: atom.global.acquire.sys.cas.b32 %a, [%x], 1, 0;\nsetp.ne.u32 %p, %a, 1;\n@%p bra GET;\n"
ONE = "setp.ne.u32 %q, %t, 0;\n@%q bra OVER;\n{}OVER: "


def test_an_exchange_by_compare_and_swap():
    put, get = ONE.format(PUT), ONE.format(GET)
    in_all(STORE + BAR + put, get + BAR + LOAD)
    found_in_all(RaceFault, None, STORE + BAR + put.replace("release", "relaxed"), get + BAR + LOAD)
    found_in_all((RaceFault, SignalFault), None, STORE + BAR + put, get.replace("acquire", "relaxed") + BAR + LOAD)


SPLIT = "setp.eq.u32 %p, %g, 1;\n@%p bra SECOND;\n{first}ret;\nSECOND: {second}"  # two programs


def test_an_atomic_operation_passes_on_what_it_has_read():
    """Two programs store and add one to a word each; who acquires a two has both."""
    first = STORE + BAR + ONE.format("red.release.sys.global.add.u32 [%y], 1;\n")
    second = first.replace("[%w]", "[%w+128]").replace("OVER", "OTHER")
    read = wait(2) + BAR + LOAD + "ld.global.b32 %e, [%z+128];\n"
    in_all(SPLIT.format(first=first, second=second) + "ret;\n", ONE.format("") + read, programs=2)
    overwritten = second.replace("red.release.sys.global.add.u32 [%y], 1", "st.release.sys.global.b32 [%y], %c")
    overwritten = overwritten.replace("setp.ne.u32 %q", f"{wait(1).replace('%x', '%y')}mov.u32 %c, 2;\nsetp.ne.u32 %q")
    in_all(SPLIT.format(first=first, second=overwritten), read, programs=2)
    passive = overwritten.replace("acquire", "relaxed")  # it has not acquired what it writes over
    found_in_all((RaceFault, SignalFault), None, SPLIT.format(first=first, second=passive), read, programs=2)


# Data.


def test_reads_that_a_later_write_overtakes():
    """The peer reads what the rank wrote, and the rank writes it anew: a second signal must say that it has."""
    write, read = STORE + BAR + signal(1), wait(1) + BAR + LOAD
    again = "mov.u32 %t, 7;\nst.global.b32 [%w], %t;\n"
    found_in_all(RaceFault, "byte .* of data of rank 1", write + again, read + BAR + signal(2, 1))
    in_all(write + wait(2, 1, "SECOND") + BAR + again, read + BAR + signal(2, 1))


def test_reads_of_many_do_not_race():
    """Every thread of three ranks reads a word of the first, which writes it behind the signals of all."""

    def bodies(memory):
        base = f"mov.u64 %w, {memory.data[0].data_ptr()};\nmov.u64 %y, {memory.pad[0].data_ptr()};\n"
        read = base + "ld.global.b32 %d, [%w];\n" + BAR
        write = wait(1, 1, "ONE") + wait(1, 2, "TWO") + BAR + "st.global.b32 [%w], %g;\n"
        return read + write, read + signal(1, 1), read + signal(1, 2)

    for order in drawn(ORDERS):
        memory = Memory(3)
        run(*bodies(memory), memory=memory, threads=64, order=order)
        memory = Memory(3)
        with pytest.raises(RaceFault, match="of rank 2"):
            run(*(each.replace(wait(1, 2, "TWO"), "") for each in bodies(memory)), memory=memory, order=order)


def test_threads_of_one_program_and_programs_of_one_rank_race_alike():
    one_word = "st.global.b32 [%w], %t;\n"
    found_in_all(RaceFault, "by thread 0 of program 0 and .* by thread 1 of program 0 access byte 0 of data", one_word)
    in_all("st.global.b32 [%w], %g;\n", threads=64)  # the same value, in one instruction
    message = "by thread 0 of program [01] and .* by thread 0 of program [01] access byte 0 of data"
    found_in_all(RaceFault, message, "st.global.b32 [%w], %g;\n", programs=2)
    far = "xor.b32 %c, %t, 32;\nmad.wide.u32 %x, %c, 4, %x;\n"
    exchange = "mov.u64 %x, %w;\n" + STORE + "{}" + far + "ld.global.b32 %d, [%x];\n"
    in_all(exchange.format(BAR), threads=64)
    found_in_all(RaceFault, None, exchange.format("bar.warp.sync -1;\n"), threads=64)
    found_in_all(RaceFault, None, exchange.format(""), threads=64)
    near = exchange.replace("32;\nmad", "1;\nmad")
    in_all(near.format("bar.warp.sync -1;\n"), threads=64)
    found_in_all(RaceFault, None, near.format(""), threads=64)


def test_signals_between_programs_of_one_rank_may_have_the_scope_of_the_gpu():
    body = SPLIT.format(first=STORE + BAR + signal(1), second=wait(1) + BAR + LOAD)
    in_all(body.replace("sys", "gpu"), programs=2)
    for scope in ("release.cta", "acquire.cta"):
        changed = body.replace("sys", "gpu").replace(f"{scope[:-3]}gpu", scope)
        found_in_all(RaceFault, None, changed, programs=2)


def test_a_launch_follows_the_one_before_on_its_rank():
    in_all([STORE, BAR + signal(1)], wait(1) + BAR + LOAD)
    found_in_all(RaceFault, None, [BAR + signal(1), STORE], wait(1) + BAR + LOAD)


def test_memory_of_another_rank_is_not_to_be_accessed():
    for order in drawn(ORDERS):
        memory = Memory(2)
        ranks = [f"mov.u64 %w, {each.data_ptr()};\n" + STORE for each in memory.own]
        run(*ranks, memory=memory, order=order)
        message = (
            r"`st.global.b32 \[%w\], %t`: thread 0 of program 0 of rank 1 accesses byte 0 of own .* of rank 0, which"
        )
        with pytest.raises(OwnerFault, match=message):
            run(ranks[0], ranks[0], memory=memory, order=order, known=True)


@pytest.mark.parametrize(
    "line",
    [
        "ld.release.sys.global.b32 %a, [%x]", "st.acquire.sys.global.b32 [%x], %a", "ld.acquire.global.b32 %a, [%x]",
        "ld.volatile.sys.global.b32 %a, [%x]", "st.weak.gpu.global.b32 [%x], %a",
        "red.acquire.sys.global.add.u32 [%x], %a", "atom.relaxed.acquire.sys.global.add.u32 %a, [%x], %a",
        "fence.acquire.sys",
        "fence.proxy.async", "membar.cta.gl",
    ],
)  # fmt: skip
def test_an_order_that_the_manual_does_not_have_is_refused(line):
    with pytest.raises(Unknown, match="the executor knows no"):
        run(f"{line};\n")


def test_faults_of_order_are_collected_and_the_kernels_run_on():
    found = []
    memory, _ = run(STORE + signal(1), wait(1) + LOAD, threads=64, found=found)
    assert torch.equal(memory.data[1][:64], torch.arange(64, dtype=torch.int32))
    assert {type(each) for each in found} == {RaceFault}


def test_traffic_between_ranks_is_counted():
    _, done = run(STORE + BAR + signal(1), wait(1) + BAR + LOAD, threads=64)
    word = 2  # each of the two warps writes it
    assert done.traffic.bytes == {(0, 1, "write"): 64 * 4 + word * 4}
    assert done.traffic.sectors == {(0, 1, "write"): 64 * 4 // 32 + word}


def test_memory_that_no_rank_has_written_is_named():
    fresh, memory = Fresh(), Memory(2)
    for data in memory.data:
        fresh.poison(data)
    message = "thread 0 of program 0 of rank 1 reads 4 bytes at .* in data of rank 1, where nothing was written"
    with pytest.raises(UnwrittenFault, match=message):
        run(signal(1), wait(1) + BAR + LOAD, memory=memory, watchers=(fresh.watcher,))
    run(STORE + BAR + signal(2), wait(2) + BAR + LOAD, memory=memory, watchers=(fresh.watcher,))


def test_launches_are_counted_each_by_itself():
    counted = []
    run(STORE + BAR + signal(1), wait(1) + BAR + LOAD, watchers=(lambda: Counters(counted),))
    mine = {each.instructions.get("ld.global.b32"): each.instructions.get("st.global.b32") for each in counted}
    assert mine == {None: (32, 1), (32, 1): None}


def test_a_race_in_shared_memory_is_found():
    lines = "mov.u64 %x, room;\nmad.wide.u32 %x, %t, 4, %x;\nst.shared.b32 [%x], %t;\n{}ld.shared.b32 %a, [room+128];\n"
    run(lines.format(BAR), "mov.u32 %d, 0;\n", threads=64, watchers=WATCHERS)
    with pytest.raises(RaceFault, match="of shared memory"):
        run(lines.format(""), lines.format(BAR), threads=64, watchers=WATCHERS)
