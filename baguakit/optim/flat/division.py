"""The division of a group: which parameters are stepped as one, and their order in memory."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from .members import PLAIN, Members, is_strided, shard_of, storage_of
from .memory import NUMBERS, OptimizerState, is_elementwise
from .tensor import Flat

LONG = 16  # so many adjacent gradients are worth a flat tensor of their own


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


@dataclass(frozen=True, eq=False)
class Candidate:
    """A parameter that may be stepped with others, and this rank's part of it and of its gradient."""

    param: Tensor
    local: Tensor
    grad: Tensor | None


def divide(params: Sequence[Tensor], state: OptimizerState, fused: bool) -> list[Flat]:
    """Return flat tensors for the parameters that can be stepped as one: of one dtype, device and kind of state.

    Parameters with adjacent gradients keep the order of these; the others have the order of `params`. `fused`: torch's
    fused kernels step them.
    """
    candidates = [c for p in params if (c := _candidate(p, sizes_for(p, fused).small)) is not None]
    flats: list[Flat] = []
    for together in _by_kind(_without_overlaps(candidates), state):
        for storage, run in _runs(together):
            sizes = sizes_for(run[0].param, fused)
            flats += [Flat(members, state, storage) for members in _chunks(run, sizes)]
    return flats


def _candidate(p: Tensor, small: int) -> Candidate | None:
    """Return the parameter as a candidate if it is small or distributed, and it and its gradient are dense."""
    # If p has no dimensions, `exp_avg` cannot be told from `step`.
    if not is_strided(p) or p.dim() == 0 or not (p.grad is None or is_strided(p.grad)):
        return None
    c = Candidate(p, shard_of(p), None if p.grad is None else shard_of(p.grad))
    if type(c.local) not in PLAIN:
        return None
    if c.grad is not None and (c.grad.shape, c.grad.dtype) != (c.local.shape, c.local.dtype):
        return None
    # Distributed ones go as shards at any size: no optimizer takes shards and distributed tensors in one call.
    return c if 0 < c.local.numel() <= small or type(p) not in PLAIN else None


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
    shared = _shared_keys(candidates, state)
    singles: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    kinds: list[tuple[Candidate, list[Any]]] = []
    for c in candidates:
        kind: list[Any] = [c.grad is None, c.local.dtype, c.local.device, type(c.param) in PLAIN, c.param in state]
        for key, value in sorted(state.get(c.param, {}).items(), key=lambda item: str(item[0])):
            if isinstance(value, NUMBERS):
                kind += [key, type(value), value]
            elif not isinstance(value, Tensor) or not is_strided(value) or key in shared:
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


def _shared_keys(candidates: list[Candidate], state: OptimizerState) -> set[str]:
    """Return the keys of state in shared memory: a flat copy would not reach the other processes."""
    first = next((state[c.param] for c in candidates if c.param in state), {})
    return {key for key, x in first.items() if isinstance(x, Tensor) and x.is_cpu and shard_of(x).is_shared()}


def _runs(together: list[Candidate]) -> Iterator[tuple[int, list[Candidate]]]:
    """Yield long runs of adjacent gradients, with the address of their storage, and then all others."""
    placed = sorted((c.grad.data_ptr(), c.grad.nbytes, i) for i, c in enumerate(together) if c.grad is not None)
    breaks = [0, *(k for k in range(1, len(placed)) if placed[k][0] != sum(placed[k - 1][:2])), len(placed)]
    in_runs: set[Candidate] = set()
    for start, stop in pairwise(breaks):
        if stop - start < min(LONG, len(together)):
            continue
        run = [together[i] for _, _, i in placed[start:stop]]
        storages = {storage_of(c.grad) for c in run if c.grad is not None}
        if len(storages) == 1:
            in_runs.update(run)
            yield storages.pop(), run
    rest = [c for c in together if c not in in_runs]
    if rest:
        yield shared_storage([c.grad for c in rest[:2] if c.grad is not None]), rest


def shared_storage(grads: Sequence[Tensor]) -> int:
    """Return the address of the storage that holds the first two of `grads`; 0 if they have two."""
    if len(grads) < 2:
        return 0
    first, second = storage_of(grads[0]), storage_of(grads[1])
    return first if first == second else 0


def _chunks(run: Sequence[Candidate], sizes: Sizes) -> Iterator[Members]:
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
            yield Members([c.param for c in cs], [c.local for c in cs])
