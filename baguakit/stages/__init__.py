"""Stages: functions on the flat tensor of a bucket, with a state that is kept from flight to flight.

    state = stage.init(bucket, comm)
    x     = stage(x, state, comm.at(round, step))      # may overwrite x; updates state in place

A stage is a frozen declaration: it holds hyperparameters only, compares by value, and prints as the expression that
built it. Its state is a nested dict of tensors. The state of a nested stage is under the name of the field that holds
the stage. Time is an argument: `comm.round` is the number of the flight, `comm.step` is the number of the step.
"""

from .. import keeping
from ..arguments import checked
from .adaptive import Adaptive
from .base import Carry as Carry
from .base import Stage
from .base import State as State
from .base import call_stage as call_stage
from .base import has_phases as has_phases
from .base import in_phases as in_phases
from .base import init_stage as init_stage
from .base import remembered as remembered
from .means import Around as Around
from .means import CompressedMean, ErrorFeedback, Hierarchical, Mean, NeighborMean, SparseMean
from .means import OnGraph as OnGraph

finite, update_if_finite_ = checked(keeping.finite), checked(keeping.update_if_finite_)

__all__ = [
    "Adaptive", "CompressedMean", "ErrorFeedback", "Hierarchical", "Mean", "NeighborMean", "SparseMean", "Stage",
    "finite", "update_if_finite_",
]  # fmt: skip
