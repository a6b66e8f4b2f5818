"""Ranks cannot import what lies here: they are sent it whole."""

import hooking
import sharding
from pool import pickle

if hasattr(pickle, "register_pickle_by_value"):
    for module in (hooking, sharding):
        pickle.register_pickle_by_value(module)
