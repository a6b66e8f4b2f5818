"""Optimizer steps by hand, and the torch operators that they are in compiled graphs."""

from ...kernels.steps.table import Fixed
from .functions import adam_step_, adamw_step_, gradient_norm, lion_step_, sgd_step_

__all__ = ["Fixed", "adam_step_", "adamw_step_", "gradient_norm", "lion_step_", "sgd_step_"]
