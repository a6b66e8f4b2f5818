"""Algorithms: each combines stages (exchanges between ranks) with windows (parts of the training step).

A function here returns an `Algorithm`, a rule or a sum of rules, for `baguakit.attach`. Print the result to see its
expression. The function raises a TypeError for an argument of a wrong type, and a ValueError for one that is out of
range. `attach` raises a ValueError if a topology does not fit the number of ranks.

After gossip and asynchronous averaging, the weights differ between ranks. Call `att.merge()` to average the weights
before you evaluate or save them.
"""

from .corrected import exact_diffusion as exact_diffusion
from .corrected import gradient_tracking as gradient_tracking
from .corrected import quasi_global_momentum as quasi_global_momentum
from .gossip import choco as choco
from .gossip import decentralized as decentralized
from .gossip import low_precision_decentralized as low_precision_decentralized
from .gossip import push_sum as push_sum
from .gradients import bytegrad as bytegrad
from .gradients import ef21 as ef21
from .gradients import gradient_allreduce as gradient_allreduce
from .gradients import qadam as qadam
from .gradients import top_k as top_k
from .local import async_model_average as async_model_average
from .local import diloco as diloco
from .local import local_sgd as local_sgd
from .power_sgd import power_sgd as power_sgd
from .signs import decoupled_momentum as decoupled_momentum
from .signs import lion_vote as lion_vote
from .signs import signum as signum

# `__all__` has every function that is imported above, so that an import of an algorithm also exports it.
__all__ = sorted(name for name, value in vars().items() if getattr(value, "__module__", "").startswith(f"{__name__}."))
