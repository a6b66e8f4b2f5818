"""The cables of a laboratory: which interfaces there are, and how fast they are."""

from dataclasses import dataclass

from baguakit.compare.pacing import bits_per_second

from .commands import batch, run

LINK = "eth0"  # what every host calls its link
QUEUE_MS = 50  # how long a packet may wait for its turn before it is dropped
CONGESTION = "cubic"  # the congestion control of Linux, whatever this machine has been set to
# A scheduler that is late by less than a burst costs no speed. The least lets the largest packet pass whole, 64 KiB and
# the headers of its frames. Cut into frames, each is work for the processors that the hosts share, which on a host of
# its own a network card does: 135 ms of a core for a compressed mean of 16 MiB on four hosts at 100 Mb/s, and 29 so.
BURST_MS, LEAST_BURST = 4, 72 << 10


@dataclass(frozen=True)
class Wires:
    """A laboratory as it is to be built.

    Attributes:
        hosts: how many, at most 250.
        rate: of each host's link, each way; None is unshaped.
        nodes: into how many nodes the hosts are divided, in order; None: all hang on one switch.
        between: the rate of each node's way to the others.
        far: whether frames wait between nodes, each host being one if there are none: see `distance`.
    """

    hosts: int
    rate: str | None = None
    nodes: int | None = None
    between: str | None = None
    far: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.hosts, int) or not 1 <= self.hosts <= 250:
            raise ValueError(f"a laboratory has 1 to 250 hosts, not {self.hosts!r}")
        for rate in (self.rate, self.between):
            if rate is not None:
                bits_per_second(rate)
        if self.nodes is not None and (self.nodes < 1 or self.hosts % self.nodes):
            raise ValueError(
                f"{self.hosts} hosts cannot be divided into {self.nodes} nodes of equal size; nodes= divides hosts="
            )
        if self.between is not None and self.nodes is None:
            raise ValueError("between= is the rate between nodes, of which there are none; give nodes=, too")

    @property
    def ends(self) -> list[str]:
        """The interfaces that meet in the middle: the ends of the nodes' cables, or of the hosts'."""
        return [f"down{node}" for node in range(self.nodes)] if self.nodes else [f"port{h}" for h in range(self.hosts)]

    @property
    def per_node(self) -> int:
        """Hosts in a node; without nodes each is one of its own."""
        return self.hosts // self.nodes if self.nodes else 1

    def address(self, host: int) -> str:
        """The address of a host; other laboratories use the same, and do not meet it."""
        return f"10.77.0.{host + 1}"


def build(wires: Wires, prefix: str) -> None:
    """Make the namespaces, the cables and the queues."""
    switch = f"{prefix}.switch"
    for name in (switch, *(host_name(prefix, host) for host in range(wires.hosts))):
        run("ip", "netns", "add", name)
    bridges = ["core"] * (not wires.far) + [f"node{node}" for node in range(wires.nodes or 0)]
    lines = [line for bridge in bridges for line in (f"link add {bridge} type bridge mcast_snooping 0", *up(bridge))]
    for node in range(wires.nodes or 0):
        lines.append(f"link add up{node} type veth peer name down{node}")
        lines += [f"link set up{node} master node{node}", *up(f"up{node}"), *up(f"down{node}")]
    for host in range(wires.hosts):
        lines.append(f"link add port{host} type veth peer name {LINK} netns {host_name(prefix, host)}")
        lines += up(f"port{host}")
        if wires.nodes:
            lines.append(f"link set port{host} master node{host // wires.per_node}")
    lines += [f"link set {end} master core" for end in wires.ends if not wires.far]
    batch("ip", switch, lines)
    for host in range(wires.hosts):
        address, net = wires.address(host), f"{wires.address(-1)}/24"
        route = f"route replace {net} dev {LINK} scope link src {address} congctl {CONGESTION}"
        batch("ip", host_name(prefix, host), [*up("lo"), *up(LINK), f"addr add {address}/24 dev {LINK}", route])
        shape(prefix, host, wires.rate)
    for node in range(wires.nodes or 0):
        queues = [queue(end, wires.between) for end in (f"up{node}", f"down{node}")]
        batch("tc", switch, [line for lines in queues for line in lines])


def host_name(prefix: str, host: int) -> str:
    """The namespace of a host."""
    return f"{prefix}.host{host}"


def up(interface: str) -> list[str]:
    """Switch an interface on, without IPv6, whose own chatter would be counted."""
    return [f"link set {interface} addrgenmode none", f"link set {interface} up"]


def shape(prefix: str, host: int, rate: str | None) -> None:
    """Give a host's link a rate, each way. Running connections go on."""
    batch("tc", host_name(prefix, host), queue(LINK, rate))
    batch("tc", f"{prefix}.switch", queue(f"port{host}", rate))


def queue(interface: str, rate: str | None) -> list[str]:
    """The lines for `tc` that put a token bucket before an interface."""
    kind = "pfifo limit 1000"
    if rate is not None:
        bits = bits_per_second(rate)
        burst = max(LEAST_BURST, bits // 8 * BURST_MS // 1000)
        kind = f"tbf rate {bits}bit burst {burst} latency {QUEUE_MS}ms"
    return [f"qdisc replace dev {interface} root {kind}"]


def in_frames(prefix: str, wires: Wires, whether: bool) -> None:
    """Let packets come to the middle as the frames into which they are cut, or whole."""
    segments = 1 if whether else 65535
    nodes = range(wires.nodes or 0)
    if nodes:
        batch("ip", f"{prefix}.switch", [f"link set up{node} gso_max_segs {segments}" for node in nodes])
    for host in () if nodes else range(wires.hosts):
        batch("ip", host_name(prefix, host), [f"link set {LINK} gso_max_segs {segments}"])
