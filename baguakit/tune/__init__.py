"""Planning and tuning: measure the network once, predict every choice, pick one, and adjust it while training.

    network = bk.tune.probe(comm)                              # α and β of its links, and how fast compressors are
    plan = bk.tune.plan(model, comm, network, step_seconds)    # algorithms × bucket sizes × flows, predicted
    tuner = bk.tune.autotune(att, plan)                        # bucket size and flows, in the first steps of training

What the model of a step leaves out: switches that many ranks overload, other users of the network, ranks of different
speed, and the start of training, where buffers and connections are new.
"""

from . import algorithm_costs  # noqa: F401  (teaches `cost` their stages)
from .compute import Compute
from .costs import Cost, Load, Place, cost
from .lines import Line
from .network import Codec, Link, Network
from .planning import Plan, plan
from .prediction import Prediction, predict
from .probing import probe
from .tuner import Trial, Tuner, autotune

__all__ = [
    "Codec",
    "Compute",
    "Cost",
    "Line",
    "Link",
    "Load",
    "Network",
    "Place",
    "Plan",
    "Prediction",
    "Trial",
    "Tuner",
    "autotune",
    "cost",
    "plan",
    "predict",
    "probe",
]
