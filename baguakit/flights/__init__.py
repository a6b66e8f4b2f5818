"""Flights: runners launch and land the buckets of rules, keep the rules' states, and save them."""

from .checkpoint import load_runners
from .gradients import GradientRunner, mean_gradients_
from .hooked import HookRunner
from .life import BACKWARD, STEP, Attached, Life, Logbook, Turn
from .runner import BucketFlight, Ledger, RuleRunner, buckets_of
from .sealing import checksum, differs_between_ranks
from .weights import FreeRunner, WeightRunner

__all__ = [
    "BACKWARD", "STEP", "Attached", "BucketFlight", "FreeRunner", "GradientRunner", "HookRunner", "Ledger", "Life",
    "Logbook", "RuleRunner", "Turn", "WeightRunner", "buckets_of", "checksum", "differs_between_ranks",
    "load_runners", "mean_gradients_",
]  # fmt: skip
