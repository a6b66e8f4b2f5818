"""The command `baguakit`, which is also `python -m baguakit`.

    baguakit doctor                 # what will run on this machine, and what mends the rest
    baguakit demo --rate 100mbit    # ranks of this machine train as over a slow network
    baguakit net build              # the NCCL plugin; `net measure` measures a link

    torchrun --standalone --nproc_per_node=4 -m baguakit probe                    # the network between the ranks
    torchrun --standalone --nproc_per_node=4 -m baguakit plan train:make_model    # the step of each algorithm

Files: `line` is the command line, `tuning` has `probe` and `plan`, `digits` trains for `demo`, `pacing` slows sockets
down, `ranks` starts ranks or joins those of torchrun, `screen` prints tables.

`import baguakit` does not import it.
"""

from .line import main

__all__ = ["main"]
