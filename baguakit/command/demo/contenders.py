"""The ways to train that the demo compares."""

from collections.abc import Sequence
from dataclasses import dataclass

from ... import algorithms
from ...rules import Algorithm, hierarchical
from ...topology import Exponential, OnePeerExact


@dataclass(frozen=True)
class Contender:
    """A way to train.

    Attributes:
        name: that of a function in `bk.algorithms`, and after a comma the variant.
        algorithm: a rule or several, as `bk.attach` takes them.
        lr: the learning rate at the beginning; it falls to zero linearly.
        reaches: the test accuracy that it must reach.
        momentum: of the optimizer; 0 where the algorithm has its own.
        needs_nodes: whether its ranks are divided into nodes of two.
        telling: whether it is one of those that say most, which are run by default and drawn.
    """

    name: str
    algorithm: Algorithm
    lr: float = 0.05
    reaches: float = 0.9
    momentum: float = 0.9
    needs_nodes: bool = False
    telling: bool = False

    @property
    def family(self) -> str:
        """Return the name without the variant."""
        return self.name.split(",")[0]


ALONE = Contender("no communication", algorithms.local_sgd(every=10**9), reaches=0)
BASE = Contender("gradient_allreduce", algorithms.gradient_allreduce(), reaches=0.97, telling=True)
CONTENDERS: tuple[Contender, ...] = (
    ALONE,
    BASE,
    Contender("bytegrad", algorithms.bytegrad(), telling=True),
    Contender("bytegrad, error feedback", algorithms.bytegrad(error_feedback=True)),
    Contender("bytegrad, hierarchical", hierarchical(algorithms.bytegrad()), needs_nodes=True),
    Contender("power_sgd", algorithms.power_sgd(rank=4), telling=True),
    Contender("top_k", algorithms.top_k(ratio=0.01)),
    Contender("qadam", algorithms.qadam(warmup_steps=40), lr=0.002, momentum=0),
    Contender("ef21", algorithms.ef21()),
    Contender("decoupled_momentum", algorithms.decoupled_momentum(), lr=0.005, momentum=0),
    Contender("signum", algorithms.signum(), lr=0.01, momentum=0),
    Contender("lion_vote", algorithms.lion_vote(), lr=0.01, momentum=0),
    Contender("decentralized, AWC", algorithms.decentralized(order="awc")),
    Contender("decentralized, ATC", algorithms.decentralized(order="atc")),
    Contender("low_precision_decentralized", algorithms.low_precision_decentralized()),
    Contender("choco", algorithms.choco()),
    Contender("choco, one peer", algorithms.choco(OnePeerExact(), gamma=1.0), telling=True),
    Contender("gradient_tracking", algorithms.gradient_tracking()),
    Contender("exact_diffusion", algorithms.exact_diffusion()),
    Contender("quasi_global_momentum", algorithms.quasi_global_momentum(), momentum=0),
    Contender("push_sum", algorithms.push_sum(Exponential())),
    Contender("local_sgd", algorithms.local_sgd(every=8), telling=True),
    Contender("diloco", algorithms.diloco(every=10), telling=True),
    Contender("gasloc", algorithms.gasloc(every=10)),
)
OTHERS = set(algorithms.__all__) - {"async_model_average", *(each.family for each in CONTENDERS)}
CONTENDERS += tuple(Contender(name, getattr(algorithms, name)()) for name in sorted(OTHERS))


def chosen(name: str | None, every: bool, ranks: int) -> Sequence[Contender]:
    """Return the contenders to run: those that say most, or `every` one, or the one of a name beside the first two.

    Raises:
        ValueError: there is none of this name for so many ranks.
    """
    able = [each for each in CONTENDERS if has_nodes(ranks) or not each.needs_nodes]
    if name is None:
        return [each for each in able if every or each.telling or each is ALONE]
    if name not in {known for each in able for known in (each.name, each.family)}:
        names = ", ".join(dict.fromkeys(each.family for each in able if each is not ALONE))
        raise ValueError(f"there is no algorithm called {name!r} for {ranks} ranks; choose one of: {names}")
    return [each for each in able if each in (ALONE, BASE) or name in (each.name, each.family)]


def has_nodes(ranks: int) -> bool:
    """Return whether the ranks can be divided into several nodes of two."""
    return ranks >= 4 and ranks % 2 == 0
