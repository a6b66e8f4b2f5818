"""All-reduces of one shot, each one Triton kernel, with the barriers of two public projects, and planted faults.

*swap*: a signal is put by an atomic compare-and-swap from 0 to 1, and taken by one from 1 to 0, as in kraken's
`symm_mem_barrier`. *flags*: a block writes the number of its barrier to a word of each peer, and waits for the same
number in words of its own, as in vLLM's custom all-reduce. Both are written anew, of the same instructions.

    python -m ptx.tests.ranks.kernels_with_signals 90 20 2 3

prints, for sm_90, 20 drawn orders, and 2 and 3 ranks, how many orders find each fault, and in how many the bytes are
right all the same. With `every` in place of 20 it tries all orders of two ranks with at most two preemptions.
"""

import sys
from dataclasses import dataclass, field, replace

import torch
import triton
import triton.language as tl

from ptx.driver import executed
from ptx.faults import DeadlockFault, Fault
from ptx.ranks import drawn, every, together

SWAPPED = """{{
    .reg .pred %p<1>;
    .reg .b32 %t<1>;
    again: atom.global.{order}.sys.cas.b32 %t0, [$1], {old}, {new};
    setp.ne.u32 %p0, %t0, {old};
    @%p0 bra again;
    mov.u32 $0, %t0;
}}"""
PUT, TAKE = SWAPPED.format(order="release", old=0, new=1), SWAPPED.format(order="acquire", old=1, new=0)
WRITE = "st.release.sys.global.b32 [$1], $2; mov.u32 $0, 0;"
WAIT = """{
    .reg .pred %p<1>;
    wait: ld.acquire.sys.global.b32 $0, [$1];
    setp.ne.u32 %p0, $0, $2;
    @%p0 bra wait;
}"""


@triton.jit
def this_thread():
    return tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def swap_barrier(pads, rank, slot, RANKS: tl.constexpr, UP: tl.constexpr, PUT: tl.constexpr, TAKE: tl.constexpr,
                 BEFORE: tl.constexpr, AFTER: tl.constexpr):  # fmt: skip
    """Thread r puts a signal for rank r, and takes the one that rank r has put here."""
    peers = tl.arange(0, UP)
    to = tl.load(pads + peers, peers < RANKS, 0) + 4 * (slot * RANKS + rank)
    mine = tl.load(pads + rank) + 4 * (slot * RANKS + peers)
    if BEFORE:
        tl.debug_barrier()
    if this_thread() < RANKS:
        tl.inline_asm_elementwise(PUT, "=r,l", [to], dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise(TAKE, "=r,l", [mine], dtype=tl.int32, is_pure=False, pack=1)
    if AFTER:
        tl.debug_barrier()


@triton.jit
def flag_barrier(pads, rank, slot, number, RANKS: tl.constexpr, UP: tl.constexpr, WRITE: tl.constexpr,
                 WAIT: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr):  # fmt: skip
    """Thread r writes the number to a word of rank r, and waits for the one that rank r writes here."""
    peers = tl.arange(0, UP)
    to = tl.load(pads + peers, peers < RANKS, 0) + 4 * (slot * RANKS + rank)
    mine = tl.load(pads + rank) + 4 * (slot * RANKS + peers)
    if BEFORE:
        tl.debug_barrier()
    if this_thread() < RANKS:
        tl.inline_asm_elementwise(WRITE, "=r,l,r", [to, number], dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise(WAIT, "=&r,l,r", [mine, number], dtype=tl.int32, is_pure=False, pack=1)
    if AFTER:
        tl.debug_barrier()


@triton.jit
def put_in(x, own, at, n):
    """A kernel before this one would do it, or this one."""
    tl.store(x.to(tl.pointer_type(tl.float32)) + at, tl.load(own + at, at < n, 0.0), at < n)


@triton.jit
def sum_in_order(buffers, at, n, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for peer in range(RANKS):
        x = tl.load(buffers + peer).to(tl.pointer_type(tl.float32))
        total += tl.load(x + at, at < n, 0.0)
    return total


@triton.jit
def swap_kernel(out, own, buffers, pads, rank, n, RANKS: tl.constexpr, UP: tl.constexpr, PUT: tl.constexpr,
                TAKE: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, EARLY: tl.constexpr,
                END: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.program_id(0) * (1 - SHARED)
    if not EARLY:
        put_in(tl.load(buffers + rank), own, at, n)
    swap_barrier(pads, rank, slot, RANKS, UP, PUT, TAKE, BEFORE, AFTER)
    if EARLY:
        put_in(tl.load(buffers + rank), own, at, n)
    tl.store(out + at, sum_in_order(buffers, at, n, RANKS, BLOCK), at < n)
    if END:
        swap_barrier(pads, rank, slot, RANKS, UP, PUT, TAKE, True, False)


@triton.jit
def flag_kernel(out, own, buffers, pads, numbers, rank, n, RANKS: tl.constexpr, UP: tl.constexpr, WRITE: tl.constexpr,
                WAIT: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, EARLY: tl.constexpr,
                END: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    block = tl.program_id(0)
    at, number = block * BLOCK + tl.arange(0, BLOCK), tl.load(numbers + block) + 1
    if not EARLY:
        put_in(tl.load(buffers + rank), own, at, n)
    flag_barrier(pads, rank, 2 * block, number, RANKS, UP, WRITE, WAIT, BEFORE, AFTER)
    if EARLY:
        put_in(tl.load(buffers + rank), own, at, n)
    tl.store(out + at, sum_in_order(buffers, at, n, RANKS, BLOCK), at < n)
    if END:
        flag_barrier(pads, rank, 2 * block + 1 - SHARED, number + SHARED, RANKS, UP, WRITE, WAIT, True, False)
    tl.debug_barrier()
    if COUNT:
        tl.store(numbers + block, number + SHARED)


@dataclass(frozen=True)
class Variant:
    """A kernel: `texts` are its two pieces of PTX, and `faults` what differs from the kernel without a fault."""

    name: str
    kernel: object
    texts: dict
    options: dict = field(
        default_factory=lambda: {"BEFORE": True, "AFTER": True, "EARLY": False, "END": True, "SHARED": 0}
    )

    def with_options(self, name, **options):
        return replace(self, name=f"{self.name}: {name}", options=self.options | options)

    def with_text(self, name, *changes):
        texts = self.texts
        for key, old, new in changes:
            assert old in texts[key]
            texts = texts | {key: texts[key].replace(old, new)}
        return replace(self, name=f"{self.name}: {name}", texts=texts)


SWAP = Variant("swap", swap_kernel, {"PUT": PUT, "TAKE": TAKE})
FLAGS = Variant("flags", flag_kernel, {"WRITE": WRITE, "WAIT": WAIT})
FLAGS = replace(FLAGS, options=FLAGS.options | {"COUNT": True})
CORRECT = (
    SWAP,
    FLAGS,
    FLAGS.with_text(
        "with fences", ("WRITE", "st.release.sys", "fence.acq_rel.sys; st.relaxed.sys"),
        ("WAIT", "acquire", "relaxed"), ("WAIT", "bra wait;", "bra wait;\n    fence.acq_rel.sys;"),
    ),
)  # fmt: skip
FAULTS = (
    SWAP.with_text("put without a release", ("PUT", "release", "relaxed")),
    SWAP.with_text("taken without an acquire", ("TAKE", "acquire", "relaxed")),
    SWAP.with_text("scope of one GPU", ("PUT", "sys", "gpu"), ("TAKE", "sys", "gpu")),
    SWAP.with_options("signal before data", EARLY=True),
    SWAP.with_options("no barrier of the block before the signal", BEFORE=False),
    SWAP.with_options("no barrier of the block after the wait", AFTER=False),
    SWAP.with_options("no second barrier", END=False),
    SWAP.with_options("one pad for all blocks", SHARED=1),
    FLAGS.with_text("volatile flags", ("WRITE", "release.sys", "volatile"), ("WAIT", "acquire.sys", "volatile")),
    FLAGS.with_text("written without a release", ("WRITE", "release", "relaxed")),
    FLAGS.with_text("read without an acquire", ("WAIT", "acquire", "relaxed")),
    FLAGS.with_text("scope of one GPU", ("WRITE", "sys", "gpu"), ("WAIT", "sys", "gpu")),
    FLAGS.with_text("plain flags", ("WRITE", ".release.sys", "")),
    FLAGS.with_options("signal before data", EARLY=True),
    FLAGS.with_options("no barrier of the block before the signal", BEFORE=False),
    FLAGS.with_options("no barrier of the block after the wait", AFTER=False),
    FLAGS.with_options("no second barrier", END=False),
    FLAGS.with_options("one pad for both barriers", SHARED=1),
    FLAGS.with_options("a number that stays", COUNT=False),
)
BLOCK, BLOCKS, LENGTH = 256, 2, 400  # with four warps


def reduced(gpu, variant, ranks, order, launches=2, found=None):
    """All-reduce vectors several times, one launch after another; return whether all ranks have the sums in order."""
    torch.manual_seed(0)
    own = [[torch.randn(LENGTH) for _ in range(launches)] for _ in range(ranks)]
    out = [[torch.zeros(LENGTH) for _ in range(launches)] for _ in range(ranks)]
    buffers = [torch.zeros(LENGTH) for _ in range(ranks)]
    pads = [torch.zeros(2 * BLOCKS * ranks, dtype=torch.int32) for _ in range(ranks)]
    tables = [[torch.tensor([x.data_ptr() for x in each]) for each in (buffers, pads)] for _ in range(ranks)]
    numbers = [torch.zeros(BLOCKS, dtype=torch.int32) for _ in range(ranks)]
    options = {"RANKS": ranks, "UP": triton.next_power_of_2(ranks), "BLOCK": BLOCK}

    def launch(rank):
        more = (numbers[rank],) if variant.kernel is flag_kernel else ()
        for x, y in zip(own[rank], out[rank], strict=True):
            arguments = (y, x, *tables[rank], *more, rank, LENGTH)
            variant.kernel[(BLOCKS,)](*arguments, **options, **variant.texts, **variant.options)

    together(gpu, ranks, launch, symmetric={"x": buffers}, signals={"pad": pads}, order=order, found=found)
    sums = [sum(own[rank][k] for rank in range(ranks)) for k in range(launches)]
    return all(torch.equal(y, s) for each in out for y, s in zip(each, sums, strict=True))


def counted(gpu, variant, ranks, orders):
    """Return in how many orders a fault is found, in how many none ends in a deadlock, and all bytes are right."""
    finding = right = 0
    for order in drawn(orders):
        found: list[Fault] = []
        try:
            right += reduced(gpu, variant, ranks, order, found=found)
        except DeadlockFault as fault:
            found.append(fault)
        finding += bool(found)
    return finding, right


def in_every_order(gpu, variant, preemptions):
    """Return in how many of all orders of two ranks all bytes are right, and how many there are."""
    right = [reduced(gpu, variant, 2, order, launches=1) for order in every(preemptions)]
    return sum(right), len(right)


def main(arch, orders, *ranks):
    with executed(int(arch)) as gpu:
        if orders == "every":
            for variant in CORRECT:
                right, count = in_every_order(gpu, variant, 2)
                print(f"2 ranks, {variant.name}: right in {right} of {count} orders", flush=True)
            return
        for count in map(int, ranks or (2, 3, 4, 8)):
            for variant in (*CORRECT, *FAULTS):
                finding, right = counted(gpu, variant, count, int(orders))
                print(
                    f"{count} ranks, {variant.name}: found in {finding} of {orders} orders, right in {right}",
                    flush=True,
                )


if __name__ == "__main__":
    main(*sys.argv[1:])
