"""Weights that each rank chooses for itself, round by round."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from math import fsum
from typing import Any, NoReturn, TypeVar

from ..arguments import instance, real, several, shown
from .base import Topology

RANKS = "a list of ranks, or a mapping such as {3: 0.5}"
_ROUNDING = 1e-6  # as far as single precision may be off

AnyStage = TypeVar("AnyStage")


@dataclass(frozen=True)
class Choice:
    """One rank's part of one round.

    Attributes:
        own: the weight of what the rank itself has.
        sources: the ranks that it hears, in rising order, and what each weighs.
        factors: the ranks that it sends to, and by what it multiplies what it sends to each; None: whoever hears it.
    """

    own: float
    sources: tuple[tuple[int, float], ...]
    factors: tuple[tuple[int, float], ...] | None


@dataclass(frozen=True, eq=False, repr=False)
class Chosen(Topology):
    """Weights that each rank sets for itself before an exchange, in a loop of its own:

        graph = Chosen()
        with bk.attach(model, optimizer, bk.algorithms.decentralized(graph, order="atc")):
            for x, y in batches:
                graph.choose(self_weight=0.5, src_weights={left: 0.5}, dst_weights=[right])
                ...

    All ranks choose so that what one hears another sends: before each round they tell each other, in a byte for each
    rank, for which the host waits; where two disagree, all raise and name these two. What is chosen holds until
    something else is. An exchange takes what is chosen when it is launched: with `order="atc"` at the end of the
    optimizer step, with "awc" before, for the next step, and for the first as the attachment is made.

    A rank knows its own row only. That the columns of the matrix sum to 1 as well, so that the mean is kept, is for the
    caller to see to: one who is heard with the weights w is to keep 1 − Σ w for itself. There is no matrix to draw and
    no period; stages that must know what others do refuse it. It is no value: two of them are never equal, and no
    checkpoint holds what was chosen.
    """

    _held: dict[str, Any] = field(default_factory=dict, init=False)  # "choice"; "targets", once ranks have agreed
    facts = ("doubly_stochastic",)  # for which those who choose answer

    def choose(
        self,
        *,
        self_weight: float | None = None,
        src_weights: Mapping[int, float],
        dst_weights: Mapping[int, float] | Iterable[int] | None = None,
    ) -> None:
        """Set this rank's weights, for all exchanges that are launched from now on. Local.

        Args:
            self_weight: of what this rank has; None means 1 − Σ src_weights.
            src_weights: the ranks that this one hears, and what each weighs here; {} hears nobody.
            dst_weights: the ranks that it sends to, and by what it multiplies what it sends to each; a list means 1,
                and None whoever hears this rank.

        Raises:
            TypeError: `src_weights` is not a mapping, a rank not a whole number, or a weight not a number.
            ValueError: a weight is not finite; or weights do not sum to 1, unless `dst_weights` multiplies.
        """
        instance("src_weights", src_weights, Mapping, "a mapping such as {3: 0.5}, or {}")
        sources = _weights("src_weights", src_weights)
        factors = None
        if dst_weights is not None:
            listed = dst_weights if isinstance(dst_weights, Mapping) else several("dst_weights", dst_weights, RANKS)
            named = listed if isinstance(listed, Mapping) else dict.fromkeys(listed, 1.0)
            factors = _weights("dst_weights", named)
        heard = fsum(weight for _, weight in sources)
        own = 1 - heard if self_weight is None else real("self_weight", self_weight)
        multiplied = isinstance(dst_weights, Mapping)  # by others as well, of which this rank does not know
        if not multiplied and abs(own + heard - 1) > _ROUNDING:
            raise ValueError(
                f"self_weight={own} and src_weights={dict(sources)} sum to {own + heard}, and those of a mean to 1; "
                "leave out self_weight= for the rest"
            )
        self._held["choice"] = Choice(own, sources, factors)

    def __repr__(self) -> str:
        return "Chosen()"

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    @property
    def choice(self) -> Choice:
        """The present choice."""
        if "choice" not in self._held:
            raise ValueError(
                "nothing has been chosen for Chosen(): call its choose(src_weights=…) before the exchange, which with "
                'order="awc" means before attach'
            )
        chosen: Choice = self._held["choice"]
        return chosen

    def fixed(self) -> "Chosen":
        """One round of this: it holds what is chosen now, whatever is chosen later."""
        round = Chosen()
        round._held.update(choice=self.choice, targets=None)
        return round

    def agreed(self) -> list[int] | None:
        """To whom this rank sends, if ranks have agreed on this round."""
        return self._held.get("targets")

    def agree(self, targets: list[int]) -> None:
        """Ranks have agreed: other buckets of one round need not ask again."""
        if "targets" in self._held:
            self._held["targets"] = targets

    # What no rank can tell

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        """Raise a ValueError: each rank chooses its own."""
        self._unknown()

    def period(self, size: int) -> int:
        """Raise a ValueError: rounds come as they are chosen."""
        self._unknown()

    def _unknown(self) -> NoReturn:
        raise ValueError(
            "each rank sets its own weights of Chosen(), round by round, and none knows those of others; "
            "decentralized(Chosen()) and neighbor_mean_ can do without: use FromMatrix([first, second, …]) here"
        )

    def static(self, size: int) -> bool:
        """False: rounds differ as they are chosen."""
        return False

    def symmetric(self, size: int) -> bool:
        """False: nothing says so."""
        return False


def chooses(stage: Any) -> bool:
    """Return whether a stage, or one in it, averages with weights that are chosen round by round."""
    if not is_dataclass(stage):
        return False
    return isinstance(stage, Chosen) or any(chooses(getattr(stage, f.name)) for f in fields(stage))


def as_chosen(stage: AnyStage) -> AnyStage:
    """Return the stage for the flights of one round: with the weights that are chosen now, whatever is chosen later.

    For the thread that trains to call, at launch: a lane would read what is chosen for another round.
    """
    if not chooses(stage):
        return stage
    if isinstance(stage, Chosen):
        return stage.fixed()  # type: ignore[return-value]
    twin = copy.copy(stage)
    for f in fields(stage):  # type: ignore[arg-type]
        object.__setattr__(twin, f.name, as_chosen(getattr(stage, f.name)))
    return twin


def _weights(name: str, given: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    for rank in given:
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise TypeError(f"the ranks in {name} are whole numbers, and {shown(rank)} is none")
    return tuple((rank, real(f"{name}[{rank}]", given[rank])) for rank in sorted(given))
