"""Algorithms: each is an expression of stages in windows of the training step.

A function here returns a rule, or a tuple of rules, to be given to `baguakit.attach`. Print it to see what it is.
"""

from .asynchronous import async_model_average
from .decentralized import decentralized
from .gradients import bytegrad, gradient_allreduce
from .local import local_sgd

__all__ = ["async_model_average", "bytegrad", "decentralized", "gradient_allreduce", "local_sgd"]
