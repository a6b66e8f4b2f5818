"""Padding: zero at every launch, in the bucket, where loading does it, and in every elementwise tensor of its state.

A coarse compressor turns zeros in a block with other values into something else. In residuals and replicas that would
stay, change the scales of the next flight, and be missing from a checkpoint.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...buckets import Bucket, Pair
from ...comm import Comm
from ...keeping import tensors_of
from ...stages import Hierarchical, Stage, State


def clear_padding_(stage: Stage, state: State, bucket: Bucket, comm: Comm, beside: bool = False) -> list[Pair]:
    """Zero the padding of every elementwise tensor in the state of a bucket, on the lane.

    With `beside`, return pairs that do so for tensors of the dtype of the bucket: it is loaded in the same launch.
    """
    if not state:
        return []
    length, zeros = bucket.flat.numel(), bucket.zeros if beside else None
    used, pairs, others = length - bucket.padding.numel(), list[Pair](), list[Tensor]()
    for each in padding_of(stage, state, used, length, comm):
        if zeros is not None and each.dtype == zeros.dtype and 0 < each.numel() <= zeros.numel():
            pairs.append((each, zeros[: each.numel()]))
        elif each.numel():
            others.append(each)
    if others:
        torch._foreach_zero_(others)
    return pairs


def padding_of(stage: Stage, state: State, used: int, length: int, comm: Comm) -> Iterator[Tensor]:
    """Yield the padding of every elementwise tensor in a state: all values after the first `used` of `length`.

    Called at each launch, since a flight may put other tensors into the state.
    """
    nested = stage.nested()
    for name, value in state.items():
        if name not in nested or not isinstance(value, dict):
            held = tensors_of(value) if used < length and name in stage.elementwise else ()
            yield from (tensor[used:] for tensor in held if tensor.shape == (length,))
        elif isinstance(stage, Hierarchical):
            shard = -(-length // comm.intra.size)
            mine = min(max(used - comm.intra.rank * shard, 0), shard)
            yield from padding_of(nested[name], value, mine, shard, comm.inter)
        elif not stage.shards:
            yield from padding_of(nested[name], value, used, length, comm)
