"""Communication primitives: functions on one tensor, or a list of tensors, over one group of ranks.

Each can be used in any training loop, on gradients, weights or other floating tensors. A trailing `_` means that the
given tensors are overwritten. All ranks of the group call the same primitives in the same order.
Optimizer steps and `gradient_norm`, which are local, come from `baguakit.optim.steps`.
"""

from ..optim.steps import Fixed as Fixed
from ..optim.steps import adam_step_ as adam_step_
from ..optim.steps import adamw_step_ as adamw_step_
from ..optim.steps import gradient_norm as gradient_norm
from ..optim.steps import lion_step_ as lion_step_
from ..optim.steps import sgd_step_ as sgd_step_
from .collectives import compressed_all_gather as compressed_all_gather
from .collectives import compressed_broadcast_ as compressed_broadcast_
from .collectives import compressed_receive_ as compressed_receive_
from .collectives import compressed_reduce_scatter as compressed_reduce_scatter
from .collectives import compressed_send as compressed_send
from .compressed import compressed_mean_ as compressed_mean_
from .compressed import mean_ as mean_
from .compressed import sparse_mean_ as sparse_mean_
from .differentiable import Differentiable as Differentiable
from .differentiable import compressed_all_to_all as compressed_all_to_all
from .flights import launch as launch
from .neighbors import neighbor_gather as neighbor_gather
from .neighbors import neighbor_mean_ as neighbor_mean_

# Export all functions and classes that are imported above.
__all__ = sorted(name for name, value in vars().items() if getattr(value, "__module__", "").startswith("baguakit."))
