"""Communication primitives: functions on one tensor, or a list of tensors, over one group of ranks.

Each can be used in any training loop, on gradients, weights or other floating tensors. A trailing `_` means that the
given tensors are overwritten. All ranks of the group call the same primitives in the same order.
Optimizer steps and `gradient_norm`, which are local, come from `baguakit.optim.steps`.
"""

from ..optim.steps import adam_step_, adamw_step_, gradient_norm, lion_step_, sgd_step_
from .collectives import (
    compressed_all_gather,
    compressed_broadcast_,
    compressed_receive_,
    compressed_reduce_scatter,
    compressed_send,
)
from .collectives import scattered_mean as scattered_mean
from .compressed import compressed_mean_, mean_, sparse_mean_
from .differentiable import Differentiable, compressed_all_to_all
from .flights import launch
from .neighbors import neighbor_gather, neighbor_mean_

__all__ = [
    "Differentiable", "adam_step_", "adamw_step_", "compressed_all_gather", "compressed_all_to_all",
    "compressed_broadcast_", "compressed_mean_", "compressed_receive_", "compressed_reduce_scatter", "compressed_send",
    "gradient_norm", "launch", "lion_step_", "mean_", "neighbor_gather", "neighbor_mean_", "sgd_step_", "sparse_mean_",
]  # fmt: skip
