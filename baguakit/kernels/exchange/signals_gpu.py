"""Signals between CTAs of different ranks, through words of memory that all ranks can reach.

A word belongs to a sender, a receiver and a CTA, and holds the number of the last exchange in which that CTA of the
sender has come so far. It is written and read only, never updated in place, because PCIe need not have atomics; and it
is never reset: numbers grow, and wrap around.

The memory model of PTX orders the data of two ranks so:

    sender      stores of the CTA → barrier of the CTA → st.release.sys of the word
    receiver    ld.acquire.sys of the word → barrier of the CTA → loads of the CTA

A release waits until all stores before it are visible, so one warp executes it, at once for the words of all ranks.
Without the barrier before it, the other warps' data might come later. After the acquire only the threads that executed
it may read the data, so a barrier must follow.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

EXPIRED = tl.constexpr(1 << 16)


@triton.jit
def word_at(base, words_at, hop, ranks, sender):
    """Return the word in which a rank hears this CTA of `sender` in a hop; `base` is its memory."""
    place = ((hop * ranks + sender) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    return (base + words_at).to(tl.pointer_type(tl.uint32)) + place


@triton.jit
def announce(words, number, places, count):
    """Write `number` to those of the words (THREADS,) at places below `count`, after all that this CTA has stored."""
    # By a branch: where only the store has a predicate, all warps wait until all is visible.
    tl.debug_barrier()
    WRITE: tl.constexpr = """{
        .reg .pred %other;
        setp.ge.s32 %other, $3, $4;
        @%other bra TOLD;
        st.release.sys.global.u32 [$1], $2;
        TOLD: mov.u32 $0, $2;
    }"""
    tl.inline_asm_elementwise(WRITE, "=r,l,r,r,r", [words.to(tl.int64), number, places, count], tl.uint32, False, 1)


@triton.jit
def heard(words, number, senders, control_ptr, limit, THREADS: tl.constexpr):
    """Wait until all words have reached `number`; return whether they have. All threads return the same.

    Args:
        words: pointers to words (THREADS,), one for each thread of the CTA; some may be equal.
        senders: whose words they are. If the wait ends without one, 1 is stored in the word 1 + sender of control.
        control_ptr: words. The wait ends when the first is not zero.
        limit: nanoseconds after which the wait ends.
    """
    zeros = tl.zeros((THREADS,), tl.int32)
    begun = clock(zeros)
    come = tl.sum(reached(words, number))  # the sum meets all threads, so that they go on together
    while come < THREADS:
        stop = (tl.load(control_ptr + zeros, volatile=True) != 0) | (clock(zeros) - begun > limit)
        come = tl.sum(reached(words, number) + stop.to(tl.int32) * EXPIRED)
    tl.debug_barrier()
    good = (come & (EXPIRED - 1)) == THREADS
    if not good:
        # Several threads may write the same word: to 1, and for the host, which no plain store may race with.
        NOTE: tl.constexpr = """{
            .reg .pred %late;
            setp.eq.u32 %late, $2, 0;
            mov.u32 $0, 1;
            @%late st.relaxed.sys.global.u32 [$1], $0;
        }"""
        noted = (control_ptr + 1 + senders).to(tl.int64)
        tl.inline_asm_elementwise(NOTE, "=r,l,r", [noted, reached(words, number)], tl.uint32, False, 1)
    return good


@triton.jit
def reached(words, number):
    """Return 1 for each word that has reached `number`, else 0."""
    READ: tl.constexpr = "ld.acquire.sys.global.u32 $0, [$1];"
    read = tl.inline_asm_elementwise(READ, "=r,l", [words.to(tl.int64)], tl.uint32, False, 1)
    return ((read - number).to(tl.int32, bitcast=True) >= 0).to(tl.int32)


@triton.jit
def clock(zeros):
    """Return the time in nanoseconds, in each element of a tensor."""
    READ: tl.constexpr = "{ mov.u64 $0, %globaltimer; }"
    return tl.inline_asm_elementwise(READ, "=l,r", [zeros], tl.int64, False, 1)
