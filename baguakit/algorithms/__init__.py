"""Algorithms: each combines stages (exchanges between ranks) with windows (parts of the training step).

A function here returns an `Algorithm`, a rule or a sum of rules, for `baguakit.attach`. Print the result to see its
expression. The function raises a TypeError for an argument of a wrong type, and a ValueError for one that is out of
range. `attach` raises a ValueError if a topology does not fit the number of ranks.

After gossip and asynchronous averaging, weights differ between ranks: `att.merge()` averages them, to evaluate or save.
"""

from .asynchronous import async_gossip, async_push_sum
from .corrected import exact_diffusion, gradient_tracking, quasi_global_momentum
from .gossip import choco, decentralized, low_precision_decentralized, push_sum
from .gradients import bytegrad, ef21, gradient_allreduce, qadam, top_k
from .local import async_model_average, decoupled_diloco, diloco, local_sgd
from .power_sgd import power_sgd
from .signs import decoupled_momentum, lion_vote, signum

__all__ = [
    "async_gossip", "async_model_average", "async_push_sum", "bytegrad", "choco", "decentralized", "decoupled_diloco",
    "decoupled_momentum", "diloco", "ef21", "exact_diffusion", "gradient_allreduce", "gradient_tracking", "lion_vote",
    "local_sgd", "low_precision_decentralized", "power_sgd", "push_sum", "qadam", "quasi_global_momentum", "signum",
    "top_k",
]  # fmt: skip
