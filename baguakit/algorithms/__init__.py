"""Algorithms: each is an expression of stages in windows of the training step.

A function here returns a rule, or a tuple of rules, to be given to `baguakit.attach`. Print it to see what it is.
"""

from .compressed import choco as choco
from .compressed import low_precision_decentralized as low_precision_decentralized
from .corrected import exact_diffusion as exact_diffusion
from .corrected import gradient_tracking as gradient_tracking
from .corrected import quasi_global_momentum as quasi_global_momentum
from .decoupled_momentum import decoupled_momentum as decoupled_momentum
from .gossip import decentralized as decentralized
from .gossip import push_sum as push_sum
from .gradients import bytegrad as bytegrad
from .gradients import ef21 as ef21
from .gradients import gradient_allreduce as gradient_allreduce
from .gradients import top_k as top_k
from .local import async_model_average as async_model_average
from .local import diloco as diloco
from .local import local_sgd as local_sgd
from .majority_vote import lion_vote as lion_vote
from .majority_vote import signum as signum
from .power_sgd import power_sgd as power_sgd
from .qadam import qadam as qadam

# The functions imported above: an algorithm is listed by its line there.
__all__ = sorted(name for name, value in vars().items() if getattr(value, "__module__", "").startswith(f"{__name__}."))
