"""Instructions that threads execute together: bar, shfl, vote, match, redux, activemask.

PTX ISA, sections 9.7.13 "Parallel Synchronization and Communication Instructions" and 9.7.9.

Instructions with `.sync` wait for the threads of their warp that the mask names; `bar.sync 0` waits for all threads of
the program. Who waits is decided by `complete`; when an action runs, all for whom a lane waits run it too.
"""

import numpy as np

from ..faults import DivergenceFault
from ..numbers.types import constant, quiet, width_of
from ..text import Integer, Sink
from .arithmetic.floating import extreme

WARP = 32
LANES = np.arange(WARP, dtype=np.uint32)
# Which operand says who takes part.
MASKS = {"shfl": 4, "vote": 2, "match": 2, "redux": 2, "bar": 0, "barrier": 0}


def _any_type(modifiers):
    return True


def complete(instruction, frame, here):
    """Return which lanes of those that are here may go on: all for whom they wait are here."""
    if instruction.opcode in ("ldmatrix", "stmatrix", "mma"):
        return here & _warp_has(frame, here, np.uint32(0xFFFFFFFF))
    if instruction.opcode in ("bar", "barrier") and "warp" not in instruction.modifiers:
        present = here.reshape(frame.programs, frame.threads).all(axis=1)
        return np.repeat(present, frame.threads)
    mask = instruction.operands[MASKS[instruction.opcode]]
    if isinstance(mask, Integer):
        return here & _warp_has(frame, here, constant(mask.value, 32))
    return here & _warp_has(frame, here, frame.register(mask.name, 32))


def members(frame, on):
    """For each warp, the bits of its lanes that are in `on`."""
    here = np.ones(frame.count, bool) if on is None else np.isin(np.arange(frame.count), on)
    return _bits_of_warps(frame, here)


def _bits_of_warps(frame, holds):
    """For each lane, the bits of its warp: which lanes a Boolean holds for."""
    bits = np.zeros(frame.programs * frame.warps_of_program, np.uint32)
    np.bitwise_or.at(bits, frame.warp[holds], np.uint32(1) << (frame.thread_of[holds] % WARP))
    return bits[frame.warp]


def _existing(frame):
    """For each lane, the bits of its warp's threads; the last warp of a program may have fewer than 32."""
    return _bits_of_warps(frame, np.ones(frame.count, bool))


def _warp_has(frame, here, mask):
    wanted = mask & _existing(frame) if frame.threads % WARP else np.broadcast_to(mask, (frame.count,))
    return (_bits_of_warps(frame, here) & wanted) == wanted


# Barriers.


def _bar(form):
    """`bar.sync 0` and `bar.warp.sync mask`: all have come; what they did before comes before what follows."""
    form.flag("cta")
    warp = form.flag("warp")
    aligned = form.flag("aligned")
    known = form.flag("sync") and not (aligned and warp)
    if not known or (not warp and form.operands != (Integer(0),)):
        raise form.unknown("such barrier")
    form.end(1)
    return lambda frame, on: frame.ordered(on, warp)


# Values of other lanes.


def _source_lane(mode, lane, b, c):
    """The lane that each lane reads of its warp, and whether that is one within its segment: the manual's own lines."""
    segment, clamp = (c >> 8) & 0x1F, c & 0x1F
    top = (lane & segment) | (clamp & ~segment)
    first = lane & segment
    if mode == "up":
        j = lane - b
        return j, j >= top
    if mode == "down":
        j = lane + b
    elif mode == "bfly":
        j = lane ^ b
    else:
        j = first | (b & ~segment)
    return j, j <= top


def _shfl(form):
    """`shfl.sync.mode.b32 d|p, a, b, c, mask`: a of another lane; or its own, and p false, beyond the segment."""
    form.kinds(1, ("b32",))
    mode = form.choice("up", "down", "bfly", "idx")
    if mode is None or not form.flag("sync"):
        raise form.unknown("such shuffle")
    form.end(5)
    write, inside = (form.target(each, kind) for each, kind in zip(form.pair(0), ("b32", "pred"), strict=True))
    a, b, c = form.sources(1, 3, "b32")
    mask = form.source(4, "b32")
    instruction = form.instruction

    def action(frame, on):
        lanes = frame.lanes(on)
        lane = (frame.thread_of[lanes] % WARP).astype(np.int64)
        offset, bounds = (np.asarray(read(frame, on)).astype(np.int64) for read in (b, c))
        other, within = _source_lane(mode, lane, offset & 0x1F, bounds)
        other = np.where(within, other, lane)
        allowed = (np.asarray(mask(frame, on)).astype(np.int64) >> other) & 1 == 1
        if not allowed.all():
            _refuse(frame, on, ~allowed, instruction, "reads a lane that its mask does not name")
        places = np.minimum(lanes - lane + other, frame.count - 1)
        write(frame, on, np.broadcast_to(a(frame, None), (frame.count,))[places])
        inside(frame, on, within)

    return action


def _refuse(frame, on, wrong, instruction, what):
    raise DivergenceFault(f"{instruction}: {frame.thread(on, wrong)} {what}")


def _vote(form):
    """`vote.sync.ballot.b32 d, p, mask`: for whom of the mask p holds; `.all`, `.any`, `.uni`: if for all, one, or all
    alike."""
    mode = form.choice("ballot", "all", "any", "uni")
    if mode is None or not form.flag("sync"):
        raise form.unknown("such vote")
    kind = form.kinds(1, ("b32",) if mode == "ballot" else ("pred",))
    form.end(3)
    write, holds, mask = form.target(0, kind), form.source(1, "pred"), form.source(2, "b32")

    def action(frame, on):
        ours, wanted = _ballot(frame, on, holds(frame, on)), mask(frame, on)
        ours = ours & wanted
        taking_part = members(frame, on)[frame.lanes(on)] & wanted
        results = {"ballot": ours, "all": ours == taking_part, "any": ours != 0}
        write(frame, on, results.get(mode, (ours == taking_part) | (ours == 0)))

    return action


def _ballot(frame, on, holds):
    everywhere = np.zeros(frame.count, bool)
    everywhere[... if on is None else on] = holds
    return _bits_of_warps(frame, everywhere)[frame.lanes(on)]


def _activemask(form):
    form.kinds(1, ("b32",))
    form.end(1)
    write = form.target(0, "b32")
    return lambda frame, on: write(frame, on, members(frame, on)[frame.lanes(on)])


def _grouped(frame, on, wanted):
    """Number the groups of lanes that act together: those of one warp with one mask."""
    keys = frame.warp[frame.lanes(on)] << 32 | np.broadcast_to(wanted, frame.lanes(on).shape).astype(np.int64)
    return np.unique(keys, return_inverse=True)[1]


REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}
REDUCTIONS |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def _redux(form):
    """`redux.sync.op.type d, a, mask`: a result of all lanes of the mask. min and max of fp32 as in 9.7.3 (sm_100)."""
    kind = form.kinds(1, ("u32", "s32", "b32", "f32"))
    name, magnitude, strict = form.choice(*REDUCTIONS), form.flag("abs"), form.flag("NaN")
    logical, float_ = name in ("and", "or", "xor"), kind == "f32"
    if (kind == "b32") != logical or (float_ and name == "add") or ((magnitude or strict) and not float_):
        raise form.unknown(f"such reduction of .{kind}")
    if name is None or not form.flag("sync"):
        raise form.unknown("such reduction")
    form.end(3)
    write, read, mask = form.target(0, kind), form.source(1, kind), form.source(2, "b32")

    def action(frame, on):
        lanes = frame.lanes(on)
        values = np.broadcast_to(read(frame, on), lanes.shape)
        values = np.abs(values) if magnitude else values
        group = _grouped(frame, on, mask(frame, on))
        order = np.argsort(group, kind="stable")
        begins = np.flatnonzero(np.diff(group[order], prepend=-1))
        if float_:
            result = _extremes(values[order], begins, name, strict)
        else:
            result = REDUCTIONS[name].reduceat(values[order], begins)
        write(frame, on, result[group].astype(values.dtype))

    return action


def _extremes(values, begins, name, strict):
    """min or max of fp32 over runs: halve the distance until each run's first holds its result."""
    ends = np.append(begins[1:], len(values))
    place, last = np.arange(len(values)), np.repeat(ends, ends - begins)
    step = 1
    while step < WARP:
        other = place + step
        values = np.where(other < last, extreme(values, values[np.minimum(other, last - 1)], name, strict), values)
        step *= 2
    return quiet(values[begins], "f32")


def _match(form):
    """`match.sync.any.type d, a, mask`: who has the same a. `.all`: d|p, the mask if all have the same, else 0."""
    kind, mode = form.kinds(1, ("b32", "b64")), form.choice("any", "all")
    if mode is None or not form.flag("sync"):
        raise form.unknown("such match")
    form.end(3)
    first, second = form.pair(0)
    if mode == "any" and not isinstance(second, Sink):
        raise form.unknown("second result of it")
    write, alike = form.target(first, "b32"), form.target(second, "pred")
    read, mask = form.source(1, kind), form.source(2, "b32")
    assert width_of(kind) in (32, 64)

    def action(frame, on):
        lanes, wanted = frame.lanes(on), mask(frame, on)
        values = np.broadcast_to(read(frame, on), lanes.shape)
        keys = np.stack([_grouped(frame, on, wanted).astype(np.uint64), values.astype(np.uint64)])
        group = np.unique(keys, axis=1, return_inverse=True)[1].ravel()
        bits = np.zeros(int(group.max()) + 1, np.uint32)
        np.bitwise_or.at(bits, group, np.uint32(1) << (frame.thread_of[lanes] % WARP))
        same = bits[group]
        if mode == "any":
            return write(frame, on, same)
        everyone = same == (members(frame, on)[lanes] & wanted)
        write(frame, on, np.where(everyone, same, np.uint32(0)))
        alike(frame, on, everyone)

    return action


DECODERS = {
    "bar": (_any_type, _bar),
    "barrier": (_any_type, _bar),
    "shfl": (_any_type, _shfl),
    "vote": (_any_type, _vote),
    "activemask": (_any_type, _activemask),
    "redux": (_any_type, _redux),
    "match": (_any_type, _match),
}
