"""Seconds and bytes to the same validation loss of a language model, for every algorithm and its peers.

    python -m bench.frontier losses      train on loopback: losses by step; hours
    python -m bench.frontier steps       seconds and bytes a step on slow networks, and some whole trainings; root
    python -m bench.frontier page        compose both: tables and pictures, on the page README.md

Results are lines of JSON in bench/results; what is there is not measured again, so an interrupted run goes on where it
was. hivemind and torchft take part where they are installed.

    contenders      what is compared, each an expression
    trajectories    the comparison (`baguakit.compare`) and its order
    timing          steps on networks
    compose         seconds to a loss: of losses by step and seconds by step
"""
