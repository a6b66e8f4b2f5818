"""The pieces of an elementwise tensor, saved under the names of the parameters of its bucket."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...buckets import Bucket, pieces

Names = Mapping[Tensor, str]


def save_pieces(saved: dict[str, Any], bucket: Bucket, names: Names, path: str, x: Tensor) -> None:
    """Save copies of the pieces of a tensor; of one of another length than the bucket, a copy for each parameter."""
    parts = [x] * len(bucket.params) if x.shape != bucket.flat.shape else pieces(x, bucket.params)
    for p, part in zip(bucket.params, parts, strict=True):
        saved[names[p]][path] = part.clone()


def gathered(parameters: Mapping[str, Any], bucket: Bucket, names: Names, path: str, like: Tensor) -> Tensor | None:
    """Return the pieces of an elementwise tensor put together like `like`; None if no parameter has one.

    A parameter that has none (it is new) keeps its values in `like`.
    """
    parts = [parameters.get(names[p], {}).get(path) for p in bucket.params]
    if all(part is None for part in parts):
        return None
    if like.shape != bucket.flat.shape:
        return torch.as_tensor(next(part for part in parts if part is not None), device=like.device)
    flat = like.clone()
    for p, view, part in zip(bucket.params, pieces(flat, bucket.params), parts, strict=True):
        if part is not None:
            if part.shape != view.shape:
                raise ValueError(
                    f"this state holds {tuple(part.shape)} of {names[p]}, and {tuple(view.shape)} is here; "
                    "shards are resumed with as many as there were"
                )
            view.copy_(part)
    return flat
