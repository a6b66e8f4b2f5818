"""Algorithms: each is an expression of stages in windows of the training step.

A function here returns a rule, or a tuple of rules, to be given to `baguakit.attach`. Print it to see what it is.
"""

from .asynchronous import async_model_average
from .decentralized import decentralized
from .diloco import diloco
from .gradient_tracking import gradient_tracking
from .gradients import bytegrad, gradient_allreduce
from .local import local_sgd
from .low_precision import choco, low_precision_decentralized
from .power_sgd import power_sgd
from .push_sum import push_sum
from .qadam import qadam
from .sparse import top_k

__all__ = [
    "async_model_average",
    "bytegrad",
    "choco",
    "decentralized",
    "diloco",
    "gradient_allreduce",
    "gradient_tracking",
    "local_sgd",
    "low_precision_decentralized",
    "power_sgd",
    "push_sum",
    "qadam",
    "top_k",
]
