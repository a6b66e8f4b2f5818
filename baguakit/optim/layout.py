"""The layout of a group: which parameters are stepped as one, and their order in memory."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .flat import NUMBERS, PLAIN, Flat, OptimizerState, is_elementwise, shard_of, storage_of

LONG = 16  # so many adjacent gradients are worth a flat tensor of their own
CALM = 8  # steps in which the same parameters must have gradients before they are laid out again


@dataclass(frozen=True)
class Sizes:
    """Numbers of values: a parameter with more than `small` is stepped alone; a flat tensor has at most `flat`."""

    small: int
    flat: int


# Measured on a CPU with 1,000 parameters: copies cost as much as they save at about 14,000 values each where torch's
# loop steps them by AdamW, at 4,000 where by SGD, at 3,000 where its fused kernel does AdamW; beyond 2^18 values flat
# tensors fall out of the cache.
CPU, CPU_FUSED = Sizes(1 << 12, 1 << 18), Sizes(1 << 11, 1 << 18)
# On a GPU starting a kernel takes as long as streaming about a million values.
GPU = Sizes(1 << 20, 1 << 26)


def sizes_for(p: Tensor, fused: bool) -> Sizes:
    """Return the sizes for parameters on the device of `p`; `fused`: torch's fused kernels step them."""
    return (CPU_FUSED if fused else CPU) if p.device.type == "cpu" else GPU


@dataclass(eq=False)
class Layout:
    """The parameters of a group, as its optimizer steps them.

    Attributes:
        params: all.
        present: which of them have a gradient.
        flats: those that are stepped as one.
        apart: the others, which torch steps as always.
        calm: the steps since others had a gradient; with fewer than `CALM` all are apart.
    """

    params: list[Tensor]
    present: list[bool]
    flats: list[Flat]
    apart: list[Tensor]
    calm: int = CALM


def lay_out(params: Sequence[Tensor], state: OptimizerState, fused: bool) -> Layout:
    """Return a layout: small parameters with a gradient in flat tensors, others apart."""
    flats = _divide([p for p in params if p.grad is not None], state, fused)
    taken = {p for flat in flats for p in flat.params}
    apart = [p for p in params if p not in taken]
    return Layout(list(params), [p.grad is not None for p in params], flats, apart)


def next_layout(before: Layout, params: Sequence[Tensor], state: OptimizerState, fused: bool) -> Layout:
    """Return the layout for a step: that of the step `before`, if it fits.

    While the set of parameters with gradients changes, all are stepped apart: laying them out costs more than it saves.
    """
    present = [p.grad is not None for p in params]
    same = len(params) == len(before.params) and all(map(is_, params, before.params))
    if not same or present != before.present:
        return Layout(list(params), present, [], list(params), calm=0)
    settled = before.calm == CALM
    before.calm = min(CALM, before.calm + 1)
    if before.calm < CALM or (settled and all(flat.fits(state) for flat in before.flats)):
        return before
    return lay_out(params, state, fused)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A parameter that may be stepped with others, and this rank's part of it and of its gradient."""

    param: Tensor
    local: Tensor
    grad: Tensor


def _divide(params: Sequence[Tensor], state: OptimizerState, fused: bool) -> list[Flat]:
    """Return flat tensors for the parameters that can be stepped as one: of one dtype, device and kind of state.

    Parameters with adjacent gradients keep the order of these; the others have the order of `params`.
    """
    candidates = [c for p in params if (c := _candidate(p, sizes_for(p, fused).small)) is not None]
    return [
        Flat([c.param for c in chunk], [c.local for c in chunk], state)
        for together in _by_kind(_without_overlaps(candidates), state)
        for run in _runs(together)
        for chunk in _chunks(run, sizes_for(run[0].param, fused))
    ]


def _candidate(p: Tensor, small: int) -> Candidate | None:
    """Return the parameter as a candidate if it is small or distributed, and it and its gradient are dense."""
    # If p has no dimensions, `exp_avg` cannot be told from `step`.
    if not _is_strided(p) or p.dim() == 0 or p.grad is None or not _is_strided(p.grad):
        return None
    c = Candidate(p, shard_of(p), shard_of(p.grad))
    if type(c.local) not in PLAIN or (c.grad.shape, c.grad.dtype) != (c.local.shape, c.local.dtype):
        return None
    # Distributed ones go as shards at any size: no optimizer takes shards and distributed tensors in one call.
    return c if 0 < c.local.numel() <= small or type(p) not in PLAIN else None


def _is_strided(x: Tensor) -> bool:
    """Return whether `x` is a strided tensor: a plain one, or a distributed one with a local shard."""
    return x.layout is torch.strided and (type(x) in PLAIN or hasattr(x, "to_local"))


def _without_overlaps(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates that share no memory: torch would step the second of two after the first changed it."""
    shared, reach, before = set(), 0, None
    for c in sorted(candidates, key=lambda c: c.local.data_ptr()):
        if c.local.numel() == 0:
            continue
        start = c.local.data_ptr()
        if start < reach:
            shared |= {c, before}
        span = 1 + sum(s * (n - 1) for s, n in zip(c.local.stride(), c.local.shape, strict=True))
        if start + span * c.local.element_size() > reach:
            reach, before = start + span * c.local.element_size(), c
    return [c for c in candidates if c not in shared]


def _by_kind(candidates: list[Candidate], state: OptimizerState) -> list[list[Candidate]]:
    """Return lists of candidates that can be stepped as one, without those whose state cannot be divided."""
    first = next((state[c.param] for c in candidates if c.param in state), {})
    # A flat copy of state in shared memory would not reach the other processes.
    shared = {key for key, x in first.items() if isinstance(x, Tensor) and x.is_cpu and shard_of(x).is_shared()}
    singles: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    kinds: list[tuple[Candidate, list[Any]]] = []
    for c in candidates:
        kind: list[Any] = [c.local.dtype, c.local.device, type(c.param) in PLAIN, c.param in state]
        for key, value in sorted(state.get(c.param, {}).items(), key=lambda item: str(item[0])):
            if isinstance(value, NUMBERS):
                kind += [key, type(value), value]
            elif not isinstance(value, Tensor) or not _is_strided(value) or key in shared:
                break
            elif is_elementwise(value, c.param):
                kind += [key, value.dtype, value.device]
            elif value.numel() == 1 and type(value) in PLAIN:
                kind += [key, value.dtype, value.device, value.shape, value]
                singles.setdefault((value.dtype, value.device), []).append(value)
            else:
                break
        else:
            kinds.append((c, kind))
    # All at once: each reading alone would wait for a GPU.
    read: dict[int, Any] = {}
    for values in singles.values():
        numbers = torch.stack([v.detach().reshape(()) for v in values]).tolist()
        read.update(zip(map(id, values), numbers, strict=True))
    together: dict[Hashable, list[Candidate]] = {}
    for c, kind in kinds:
        together.setdefault(tuple(read.get(id(x), x) for x in kind), []).append(c)
    return list(together.values())


def _runs(together: list[Candidate]) -> Iterator[list[Candidate]]:
    """Yield long runs of adjacent gradients of one storage, and then all others."""
    placed = sorted((c.grad.data_ptr(), c.grad.nbytes, i) for i, c in enumerate(together))
    breaks = [0, *(k for k in range(1, len(placed)) if placed[k][0] != sum(placed[k - 1][:2])), len(placed)]
    in_runs: set[Candidate] = set()
    for start, stop in pairwise(breaks):
        run = [together[i] for _, _, i in placed[start:stop]]
        if len(run) >= min(LONG, len(together)) and len({storage_of(c.grad) for c in run}) == 1:
            in_runs.update(run)
            yield run
    if rest := [c for c in together if c not in in_runs]:
        yield rest


def _chunks(run: Sequence[Candidate], sizes: Sizes) -> Iterator[list[Candidate]]:
    """Yield the members of each flat tensor of a run: none too long, large shards alone, no plain tensor alone."""
    left, chunk, chunks = 0, -1, []
    for c in run:
        n = c.local.numel()
        left -= n
        if left < 0 or n > sizes.small:
            chunk, left = chunk + 1, sizes.flat - n if n <= sizes.small else 0
        chunks.append((chunk, c))
    for _, members in groupby(chunks, key=lambda x: x[0]):
        cs = [c for _, c in members]
        if len(cs) > 1 or type(cs[0].param) not in PLAIN:
            yield cs
