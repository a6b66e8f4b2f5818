"""Stages: what happens to a flat tensor, and what is remembered from flight to flight.

    state = stage.init(bucket, comm)
    x     = stage(x, state, comm.at(round, step))      # may overwrite x; updates state in place

A stage is a frozen declaration: it holds hyperparameters only, compares by value, and prints as the expression that
built it. Its state is a nested dict of tensors, one level for each nested stage, under the name of the field that
holds it. Time is an argument: `comm.round` is the ordinal of the flight, `comm.step` the number of optimizer steps.
"""

from ..keeping import finite as finite
from ..keeping import keep_ as keep_
from .base import Carry as Carry
from .base import Stage
from .base import State as State
from .base import flown as flown
from .means import CompressedMean, Mean, NeighborMean, SparseMean
from .wrappers import ErrorFeedback, Hierarchical

__all__ = ["CompressedMean", "ErrorFeedback", "Hierarchical", "Mean", "NeighborMean", "SparseMean", "Stage"]
