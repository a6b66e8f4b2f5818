"""The choices of a plan: algorithms, bucket sizes that make a difference, and numbers of flows."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from .. import algorithms
from ..comm import Comm
from ..compressors import Compressor, UInt4
from ..costs import Network
from ..rules import Algorithm, Rule, hierarchical, rules_of
from ..stages import Hierarchical
from ..topology import Exponential
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


def choices_of(named: Sequence[Algorithm] | None, comm: Comm) -> tuple[list[Algorithm], dict[str, str]]:
    """Return the algorithms to choose from in this group, and of those that cannot work in it the reasons.

    With nodes, each is tried between nodes as well. One that was named and cannot work raises its error.
    """
    if named is None:
        choices, left_out = sifted(list(every()), lambda each: check(each, comm))
    else:
        if isinstance(named, Rule) or not isinstance(named, Sequence) or not named:
            wanted = "a list of the algorithms to choose from, such as [bk.algorithms.bytegrad()]"
            raise TypeError(f"algorithms is {wanted}, not {named!r}")
        choices, left_out = list(dict.fromkeys(named)), {}
        for each in choices:
            check(each, comm)
    if comm.hierarchical:
        choices += [between for each in choices if (between := by_nodes(each, comm)) is not None]
    return choices, left_out


def every() -> dict[Algorithm, str]:
    """Return every algorithm as it is by default, and the usual forms of `bytegrad`, with their calls.

    Preferred ones come first.
    """
    byte, push_sum = algorithms.bytegrad, algorithms.push_sum
    found: dict[Algorithm, str] = {
        algorithms.gradient_allreduce(): "bk.algorithms.gradient_allreduce()",
        byte(): "bk.algorithms.bytegrad()",
        byte(error_feedback=True): "bk.algorithms.bytegrad(error_feedback=True)",
        byte(UInt4(), error_feedback=True): "bk.algorithms.bytegrad(bk.compressors.UInt4(), error_feedback=True)",
        push_sum(Exponential()): "bk.algorithms.push_sum(bk.topology.Exponential())",
    }
    names = [name for name in algorithms.__all__ if name != "push_sum"]  # which has no topology by default
    return found | {getattr(algorithms, name)(): f"bk.algorithms.{name}()" for name in names}


def probed(choices: Sequence[Algorithm], network: Network) -> tuple[list[Algorithm], dict[str, str]]:
    """Return the algorithms whose compressors the network was probed for, and the reasons to leave out the others."""

    def look_up(algorithm: Algorithm) -> None:
        for compressor in compressors_in([algorithm]) if network.ranks > 1 else ():
            network.codec(compressor)

    return sifted(choices, look_up)


def sifted(
    choices: Sequence[Algorithm], attempt: Callable[[Algorithm], None]
) -> tuple[list[Algorithm], dict[str, str]]:
    """Return the algorithms with which `attempt` raises no ValueError, and what it says of the others."""
    able, left_out = [], {}
    for each in choices:
        try:
            attempt(each)
        except ValueError as error:
            left_out[written(each)] = str(error)
        else:
            able.append(each)
    return able, left_out


def check(algorithm: Algorithm, comm: Comm) -> None:
    """Raise a ValueError if an algorithm cannot work in this group."""
    for rule in rules_of(algorithm):
        rule.stage.check(comm)


def by_nodes(algorithm: Algorithm, comm: Comm) -> Algorithm | None:
    """Return the algorithm between nodes; None if that is impossible or it is so already."""
    if any(isinstance(rule.stage, Hierarchical) for rule in rules_of(algorithm)):
        return None
    try:
        between = hierarchical(algorithm)
        check(between, comm)
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
