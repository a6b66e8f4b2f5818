"""Measurements of a network and of the machines on it: they print as tables and travel as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..arguments import check_fields, checked, describe, integer
from ..compressors import Compressor
from .lines import Line


@dataclass(frozen=True)
class Link:
    """The cost of messages on a class of links, over a number of flows.

    Attributes:
        part: "flat", all ranks; with nodes also "intra", those of a node, and "inter", one of each node.
        flows: connections to each peer, as in `Comm(flows=…)`.
        ranks: the number of ranks that exchange on it together.
        exchange: the line of an exchange in which every rank sends one message to the next rank, and receives one.
        all_reduce: the α and β of the ring 2 (n − 1) α + 2 (n − 1)/n β S that takes as long.
        all_to_all: the line of an exchange in which every rank sends to all others, by the bytes that it sends in all;
            None: the same as `exchange`.
    """

    part: str
    flows: int
    ranks: int
    exchange: Line
    all_reduce: Line
    all_to_all: Line | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        integer("flows", self.flows, 1)

    @property
    def to_all(self) -> Line:
        """Return the line of messages to ranks anywhere in this part."""
        return self.exchange if self.all_to_all is None else self.all_to_all


@dataclass(frozen=True)
class Codec:
    """The speed of a compressor, in seconds a value, with all ranks at work.

    Attributes:
        name: the compressor, as it prints.
        compress, decompress: of fp32 values.
        reduce: to average packed rows, for each value of each row; for a sparse compressor, to add rows.
    """

    name: str
    compress: float
    decompress: float
    reduce: float

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, repr=False)
class Network:
    """The measurements of `probe`. The same on all ranks: each time is that of the slowest.

    Attributes:
        ranks: n.
        per_node: ranks of a node; 1 if nodes are not known.
        device: the kind of device the tensors were on, "cpu" or "cuda".
        threads: torch's, on each rank.
        links: by part and flows.
        codecs: the speeds of the compressors that were probed.
        copy: seconds to copy a byte.
        launch: seconds to put work on a lane and to get its result.
        crowding: κ, the slowdown of a rank's computation by a second thread (on CUDA a second stream) that computes as
            well: 0 if each has a core, 1 if they share one.
    """

    ranks: int
    per_node: int
    device: str
    threads: int
    links: tuple[Link, ...]
    codecs: tuple[Codec, ...] = ()
    copy: float = 0.0
    launch: float = 0.0
    crowding: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    @checked
    def link(self, part: str, flows: int = 1) -> Link:
        """Return the link of a part of the network, over a number of flows.

        Raises:
            ValueError: it has not been measured.
        """
        for link in self.links:
            if (link.part, link.flows) == (part, flows):
                return link
        known = ", ".join(f"{link.part} over {link.flows}" for link in self.links) or "nothing"
        raise ValueError(
            f"nothing is known of the {part!r} network over {flows} flows, only of {known}; "
            "probe it with flows=(…) and, for nodes, comm=Comm(mesh=…)"
        )

    def flows(self) -> tuple[int, ...]:
        """Return the numbers of flows that have been measured, in rising order."""
        return tuple(sorted({link.flows for link in self.links})) or (1,)

    @checked
    def codec(self, compressor: Compressor) -> Codec:
        """Return the speed of a compressor.

        Raises:
            ValueError: it has not been measured.
        """
        for codec in self.codecs:
            if codec.name == repr(compressor):
                return codec
        raise ValueError(
            f"nothing is known of the speed of {compressor!r}; probe it with compressors=[{compressor!r}, …]"
        )

    def to_json(self) -> str:
        """Return the measurements as text that `from_json` reads."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    @checked
    def from_json(cls, text: str) -> "Network":
        """Read the text that `to_json` wrote.

        Raises:
            ValueError: the text is something else.
        """
        try:
            found: dict[str, Any] = json.loads(text)
            links = tuple(_link(each) for each in found.pop("links"))
            codecs = tuple(Codec(**each) for each in found.pop("codecs"))
            return cls(links=links, codecs=codecs, **found)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"this text is not what Network.to_json wrote: {describe(text)}; {type(error).__name__} {error}"
            ) from error

    def __str__(self) -> str:
        nodes = f", {self.per_node} a node" if self.per_node > 1 else ""
        lines = [f"{self.ranks} ranks{nodes}, {self.device}, {self.threads} threads"]
        lines += self._links() if self.links else []
        lines += self._codecs() if self.codecs else []
        lines.append(
            f"copying {gigabytes(self.copy)}, launching {self.launch * 1e6:.0f} µs, "
            f"a second thread takes {self.crowding:.0%} of the first"
        )
        return "\n".join(lines)

    __repr__ = __str__

    def _links(self) -> list[str]:
        lines = [f"{'link':<8}{'flows':>6}{'ranks':>6}  {'exchange':<12}{'α':>10}{'1/β':>13}{'busy':>6}"]
        for link in self.links:
            place = f"{link.part:<8}{link.flows:>6}{link.ranks:>6}"
            kinds = {"message": link.exchange, "all-reduce": link.all_reduce, "all-to-all": link.to_all}
            for name, line in kinds.items():
                share = line.busy / line.beta if line.beta else 0.0
                alpha, rate = f"{line.alpha * 1e6:.0f} µs", f"{line.rate / 1e6:.1f} MB/s"
                lines.append(f"{place:<20}  {name:<12}{alpha:>10}{rate:>13}{share:>6.0%}")
                place = ""
        return lines

    def _codecs(self) -> list[str]:
        lines = [f"{'compressor':<32}{'compress':>12}{'decompress':>12}{'reduce':>12}"]
        for codec in self.codecs:
            speeds = (codec.compress, codec.decompress, codec.reduce)
            lines.append(f"{codec.name:<32}" + "".join(f"{gigabytes(s / 4):>12}" for s in speeds))
        return lines


def _link(found: Mapping[str, Any]) -> Link:
    lines = {name: Line(**line) for name, line in found.items() if isinstance(line, Mapping)}
    return Link(**{**found, **lines})


def gigabytes(seconds: float) -> str:
    """Return seconds a byte as a string of GB/s."""
    return f"{1e-9 / seconds:.2f} GB/s" if seconds else "free"
