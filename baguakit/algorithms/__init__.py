"""Algorithms: each is an expression of stages in windows of the training step.

A function here returns a rule, or a tuple of rules, to be given to `baguakit.attach`. Print it to see what it is.
"""

from .gossip.choco import choco as choco
from .gossip.decentralized import decentralized as decentralized
from .gossip.exact_diffusion import exact_diffusion as exact_diffusion
from .gossip.gradient_tracking import gradient_tracking as gradient_tracking
from .gossip.low_precision import low_precision_decentralized as low_precision_decentralized
from .gossip.push_sum import push_sum as push_sum
from .gossip.quasi_global import quasi_global_momentum as quasi_global_momentum
from .gradients.allreduce import gradient_allreduce as gradient_allreduce
from .gradients.bytegrad import bytegrad as bytegrad
from .gradients.decoupled_momentum import decoupled_momentum as decoupled_momentum
from .gradients.ef21 import ef21 as ef21
from .gradients.majority_vote import lion_vote as lion_vote
from .gradients.majority_vote import signum as signum
from .gradients.power_sgd import power_sgd as power_sgd
from .gradients.qadam import qadam as qadam
from .gradients.top_k import top_k as top_k
from .local.asynchronous import async_model_average as async_model_average
from .local.diloco import diloco as diloco
from .local.local_sgd import local_sgd as local_sgd

# The functions imported above: an algorithm is listed by its line there.
__all__ = sorted(name for name, value in vars().items() if getattr(value, "__module__", "").startswith(f"{__name__}."))
