"""Planning and tuning: measure the network, predict the time of every choice, pick one, and adjust it in training.

    network = bk.tune.probe(comm)                              # α and β of its links, and how fast compressors are
    plan = bk.tune.plan(model, comm, network, step_seconds)    # predicts algorithms × bucket sizes × flows
    tuner = bk.tune.autotune(att, plan)                        # bucket size and flows, in the first steps of training

The model of a step leaves out congestion of switches, other users of the network, ranks of different speed, and the
start of training, when buffers and connections are new.
"""

from ..costs import Codec, Cost, Line, Link, Load, Network, Place
from ..expressions import show_public
from .planning import Plan, describe, plan
from .prediction import Effect, Prediction, effect, predict
from .probing import Compute, probe
from .simulation import Event, Machine, Simulation, simulate
from .tuner import Trial, Tuner, autotune

__all__ = ["Codec", "Compute", "Cost", "Effect", "Event", "Line", "Link", "Load", "Machine", "Network", "Place", "Plan"]
__all__ += ["Prediction", "Simulation", "Trial", "Tuner", "autotune", "describe", "effect", "plan"]
__all__ += ["predict", "probe", "simulate"]

show_public(__name__)
