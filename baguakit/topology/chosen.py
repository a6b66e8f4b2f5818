"""A topology whose weights each rank sets before each round."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from math import fsum
from typing import Any, NoReturn

from ..arguments import describe, message, real, several
from .base import Topology

_ROUNDING = 1e-6  # the error of single precision


@dataclass(frozen=True)
class Choice:
    """The weights of one rank in one round."""

    own: float  # of its own values
    sources: dict[int, float]  # {rank: weight} of the ranks that it hears, in rising order
    factors: dict[int, float] | None  # {rank: factor} of those that it sends to; None: its values, to all that hear it


class Chosen(Topology):
    """A topology whose weights each rank sets for itself, in the user's training loop:

        graph = Chosen()
        with bk.attach(model, optimizer, bk.algorithms.decentralized(graph, order="atc")):
            for x, y in batches:
                graph.choose(self_weight=0.5, src_weights={left: 0.5}, dst_weights=[right])
                ...

    Before each round the ranks exchange one byte per pair of ranks, and the host waits for these bytes. If the choices
    of two ranks do not match, all ranks raise an error that names both. A choice is valid until the next choice. An
    exchange uses the choice that is valid at its launch, at the end of an optimizer step. With "awc" an exchange
    belongs to the next step, and `attach` launches the exchange of the first step.

    A rank knows its own row only. The caller must make the columns of the matrix sum to 1, too: if other ranks hear a
    rank with the weights w, this rank gives itself the weight 1 − Σ w. Stages that need the whole matrix refuse a
    `Chosen`. Two `Chosen` are never equal, and checkpoints do not contain the choices.
    """

    facts = ("doubly_stochastic",)  # the caller's responsibility

    def __init__(self) -> None:
        self._choice: Choice | None = None
        self.one_round = False  # for one round, so that what ranks agree on holds for all its buckets
        self.targets_agreed: list[int] | None = None

    def choose(
        self,
        *,
        self_weight: float | None = None,
        src_weights: Mapping[int, float],
        dst_weights: Mapping[int, float] | Iterable[int] | None = None,
    ) -> None:
        """Set this rank's weights for all exchanges that are launched from now on. Nothing is sent.

        Args:
            self_weight: the weight of this rank's own values; None means 1 − Σ src_weights.
            src_weights: {rank: weight} for the ranks that this rank hears; {} for none.
            dst_weights: {rank: factor} for the ranks that this rank sends to. The values are multiplied by the factor
                and sent. A list of ranks means factors of 1. None means all ranks that hear this rank.

        Raises:
            TypeError: `src_weights` is not a mapping, a rank is not a whole number, or a weight is not a number.
            ValueError: a weight is not finite; or the weights do not sum to 1 and `dst_weights` has no factors.
        """
        sources = weights_in("src_weights", src_weights)
        factors = None if dst_weights is None else weights_in("dst_weights", dst_weights)
        for name, ranks in (("src_weights", sources), ("dst_weights", factors or {})):
            for rank in ranks:
                if not isinstance(rank, int) or isinstance(rank, bool):
                    raise TypeError(f"each rank in {name} is a whole number, not {describe(rank)}")
        sources = dict(sorted(sources.items()))
        heard = fsum(sources.values())
        own = 1 - heard if self_weight is None else real("self_weight", self_weight)
        # With factors, a row has src_weights times the factors of other ranks, which this rank does not know.
        if not isinstance(dst_weights, Mapping) and abs(own + heard - 1) > _ROUNDING:
            raise ValueError(
                f"self_weight={own} and src_weights={sources} sum to {own + heard}, not 1; "
                "leave out self_weight= to use the rest"
            )
        self._choice = Choice(own, sources, factors)

    __eq__, __hash__ = object.__eq__, object.__hash__

    @property
    def choice(self) -> Choice:
        """Return the current choice; raise a ValueError if there is none yet."""
        if self._choice is None:
            raise ValueError(
                "Chosen() has no weights yet: call its choose(src_weights=…) before the exchange; "
                'with order="awc" before attach'
            )
        return self._choice

    def period(self, size: int) -> NoReturn:
        """Raise a ValueError: future rounds are unknown."""
        raise ValueError(
            "each rank sets its own weights of Chosen() in each round and does not know the weights of other ranks; "
            "use it in decentralized(Chosen()) or neighbor_mean_, and FromMatrix([first, second, …]) here"
        )

    def links(self, rank: int, size: int, round: int) -> NoReturn:
        """Raise a ValueError: the other ranks' weights are unknown."""
        self.period(size)


def chooses(stage: Any) -> bool:
    """Return whether a stage, or a stage that it contains, averages over a `Chosen`."""
    if not is_dataclass(stage):
        return False
    return isinstance(stage, Chosen) or any(chooses(getattr(stage, f.name)) for f in fields(stage))


def as_chosen(stage: Any) -> Any:
    """Return the stage with its `Chosen` fixed to the present weights: the next may be chosen before a lane runs it."""
    if isinstance(stage, Chosen):
        round = Chosen()
        round._choice, round.one_round = stage.choice, True
        return round
    if not chooses(stage):
        return stage
    held = {f.name: getattr(stage, f.name) for f in fields(stage)}
    return replace(stage, **{name: as_chosen(value) for name, value in held.items() if chooses(value)})


def weights_in(name: str, given: Mapping[int, float] | Iterable[int]) -> dict[int, float]:
    """Return {rank: weight} for the argument `name`. A list means weights of 1; for `src_weights` it is a TypeError."""
    if not isinstance(given, Mapping):
        if name == "src_weights":
            raise TypeError(message(name, "a mapping such as {3: 0.5}, or {}", given))
        given = dict.fromkeys(several(name, given, "a list of ranks, or a mapping such as {3: 0.5}"), 1.0)
    return {rank: real(f"{name}[{rank!r}]", weight) for rank, weight in given.items()}
