"""A network laboratory on one machine: hosts as network namespaces, whose links are as slow as one likes.

    python -m bench.netlab --hosts 4 --rate 500mbit -- python -m baguakit demo

runs the command on four hosts, as `torchrun` would: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, and
GLOO_SOCKET_IFNAME names the link. What is shaped is real TCP between real processes. From Python:

    with Lab(hosts=4, rate="500mbit") as lab:
        lab.run(["python", "train.py"])
        print([host.sent for host in lab.bytes()])

             ┌ switch ──────────────────────────────┐
    host 0 ══╪══ port0 ─┐                           │      ══ a link of `rate` each way: tbf on both of its ends
    host 1 ══╪══ port1 ─┴─ node0 ══ up0 ─┐          │         (a queue that lets `rate` pass, with a burst of 4 ms,
    host 2 ══╪══ port2 ─┐                ├─ core    │         of 72 KiB at least)
    host 3 ══╪══ port3 ─┴─ node1 ══ up1 ─┘          │      with nodes=2; without, all ports are on `core`
             └──────────────────────────────────────┘

A rate counts all that is on the wire. Of 1,514 bytes of an Ethernet frame 1,448 are TCP's payload, so the best that a
program can see is 95.6 % of it. What the interfaces' counters say lies between: packets of up to 64 KiB are counted
whole, with one header, and pass the queue as the frames that they stand for. `Counters.payload` takes the headers off.

Connections between hosts are controlled by cubic, Linux's own choice, whatever the machine has been set to: with BBR,
the same exchanges take up to a tenth longer, since it probes, and remembers the rate of a link that it shared.

Latency is that of the queues, unless `delay=` is given. Then a process stands in the place of `core` (see `distance`),
which holds every frame for that time, loses some with `loss=`, and can be halted or ended while connections go on.
"""

from .commands import enter
from .counters import Counters
from .distance import Way, way
from .lab import Lab, obstacle
from .loopback import Loopback
from .ranks import Ended, Ranks
from .wires import LINK

__all__ = ["LINK", "Counters", "Ended", "Lab", "Loopback", "Ranks", "Way", "enter", "obstacle", "way"]
