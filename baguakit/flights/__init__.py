"""Flights: runners that launch and land the buckets of rules, what they decide and remember, and its saved state."""

from .checkpoint import load_bucket, load_runners, save_runner, whole_of
from .clock import BACKWARD, STEP, Clock, Logbook, Turn, announce_nothing, part_of
from .gradients import Decisions, GradientRunner, mean_gradients_
from .losses import Losses
from .runner import BucketFlight, Journal, Kinds, Ledger, RuleRunner, buckets_of, call_unscaled, check_unconverted
from .sealing import differs_between_ranks, opened, sealed
from .weights import FreeRunner, WeightRunner

__all__ = [
    "BACKWARD",
    "STEP",
    "BucketFlight",
    "Clock",
    "Decisions",
    "FreeRunner",
    "GradientRunner",
    "Journal",
    "Kinds",
    "Ledger",
    "Logbook",
    "Losses",
    "RuleRunner",
    "Turn",
    "WeightRunner",
    "announce_nothing",
    "buckets_of",
    "call_unscaled",
    "check_unconverted",
    "differs_between_ranks",
    "load_bucket",
    "load_runners",
    "mean_gradients_",
    "opened",
    "part_of",
    "save_runner",
    "sealed",
    "whole_of",
]
