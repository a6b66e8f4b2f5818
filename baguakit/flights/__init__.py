"""Flights: runners that launch and land the buckets of rules, what they decide and remember, and its saved state."""

from .checkpoint import load_bucket, load_runners, save_runner, whole_of
from .clock import Clock, Turn, announce_nothing
from .decisions import Decisions
from .freerunning import FreeRunner
from .gradients import GradientRunner, mean_gradients_
from .logbook import BACKWARD, STEP, Logbook, StepRecord, part_of
from .losses import Losses
from .runner import RECORDED, BucketFlight, Journal, RuleRunner, buckets_of, call_unscaled, check_unconverted
from .sealing import differs_between_ranks, opened, sealed
from .ways import Way, Ways, in_words, numbered, ways_in
from .weights import WeightRunner

__all__ = [
    "BACKWARD",
    "RECORDED",
    "STEP",
    "BucketFlight",
    "Clock",
    "Decisions",
    "FreeRunner",
    "GradientRunner",
    "Journal",
    "Logbook",
    "Losses",
    "RuleRunner",
    "StepRecord",
    "Turn",
    "Way",
    "Ways",
    "WeightRunner",
    "announce_nothing",
    "buckets_of",
    "call_unscaled",
    "check_unconverted",
    "differs_between_ranks",
    "in_words",
    "load_bucket",
    "load_runners",
    "mean_gradients_",
    "numbered",
    "opened",
    "part_of",
    "save_runner",
    "sealed",
    "ways_in",
    "whole_of",
]
