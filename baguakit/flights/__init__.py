"""Flights: a runner launches the buckets of a rule, waits for the results, and keeps and saves the rule's states."""

from .checkpoint import load_bucket, load_runners, save_runner, whole_of
from .gradients import GradientRunner
from .life import BACKWARD, STEP, Attached, Clock, Life, Logbook, Turn
from .runner import BucketFlight, Ledger, RuleRunner, Weighing, buckets_of
from .sealing import differs_between_ranks
from .weights import FreeRunner, WeightRunner

__all__ = [
    "BACKWARD", "STEP", "Attached", "BucketFlight", "Clock", "FreeRunner", "GradientRunner", "Ledger", "Life",
    "Logbook", "RuleRunner", "Turn", "Weighing", "WeightRunner", "buckets_of", "differs_between_ranks",
    "load_bucket", "load_runners", "save_runner", "whole_of",
]  # fmt: skip
