"""Ranks cannot import what lies here: they are sent it whole."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "interop"))

import bagua
import sharding
from pool import pickle

if hasattr(pickle, "register_pickle_by_value"):
    for module in (bagua, sharding):
        pickle.register_pickle_by_value(module)
