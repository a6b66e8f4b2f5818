"""The choices of a plan: algorithms, bucket sizes that make a difference, and numbers of flows."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..algorithms import bytegrad, gradient_allreduce
from ..comm import Comm
from ..compressors import Compressor
from ..costs import Network
from ..rules import Algorithm, Rule, hierarchical, rules_of
from ..stages import Hierarchical
from .prediction import buckets_of


def counts_of(algorithm: Algorithm, network: Network, flows: Sequence[int]) -> list[int]:
    """Return the numbers of flows that change the cost: with nodes, only exchanges between them are divided."""
    counts = sorted(set(flows))
    between = any(isinstance(rule.stage, Hierarchical) for rule in rules_of(algorithm))
    return counts if between or network.per_node == 1 else counts[:1]


def distinct(algorithm: Algorithm, named: Mapping[str, Tensor], sizes: Sequence[int]) -> list[int]:
    """Return the sizes that give different buckets; of sizes with equal buckets, the first."""
    lengths = {
        size: [[len(b) for b in buckets_of(rule, named, size)] for rule in rules_of(algorithm)] for size in sizes
    }
    return [size for i, size in enumerate(sizes) if lengths[size] not in [lengths[other] for other in sizes[:i]]]


def choices_of(algorithms: Sequence[Algorithm] | None, comm: Comm) -> list[Algorithm]:
    """Return the algorithms to choose from in this group; with nodes, also each between nodes."""
    named = [gradient_allreduce(), bytegrad()] if algorithms is None else algorithms
    if isinstance(named, Rule) or not isinstance(named, Sequence) or not named:
        raise TypeError(
            f"algorithms is a list of the algorithms to choose from, such as [bk.algorithms.bytegrad()], not {named!r}"
        )
    choices = list(dict.fromkeys(named))
    for rule in rules_of(*choices):
        rule.stage.check(comm)
    if comm.hierarchical:
        choices += [between for each in choices if (between := by_nodes(each, comm)) is not None]
    return choices


def by_nodes(algorithm: Algorithm, comm: Comm) -> Algorithm | None:
    """Return the algorithm between nodes; None if that is impossible or it is so already."""
    if any(isinstance(rule.stage, Hierarchical) for rule in rules_of(algorithm)):
        return None
    try:
        between = hierarchical(algorithm)
        for rule in rules_of(between):
            rule.stage.check(comm)
    except (TypeError, ValueError):  # it needs shapes, or a graph of as many nodes is impossible
        return None
    return between


def compressors_in(algorithms: Sequence[Algorithm]) -> list[Compressor]:
    """Return the compressors in algorithms, each once."""
    stages = [stage for rule in rules_of(*algorithms) for stage in rule.stage.whole()]
    return list(dict.fromkeys(each for stage in stages for each in stage.compressors()))


def written(algorithm: Algorithm) -> str:
    """Return the expression of an algorithm."""
    return ", ".join(repr(rule) for rule in rules_of(algorithm))


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 flow", "2 flows"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
