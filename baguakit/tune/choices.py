"""The choices of a plan: algorithms, bucket sizes that make a difference, and numbers of flows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from ..algorithms import bytegrad, gradient_allreduce
from ..comm import Comm
from ..compressors import Compressor
from ..rules import Algorithm, Rule, hierarchical, rules_of
from ..stages import Hierarchical
from .network import Network
from .prediction import cut_of


def counts_of(algorithm: Algorithm, network: Network, flows: Sequence[int]) -> list[int]:
    """The numbers of flows that make a difference to an algorithm: with nodes, only to what is between them."""
    counts = sorted(set(flows))
    between = any(isinstance(rule.stage, Hierarchical) for rule in rules_of(algorithm))
    return counts if between or network.per_node == 1 else counts[:1]


def distinct(algorithm: Algorithm, named: Mapping[str, Tensor], sizes: Sequence[int]) -> list[int]:
    """The sizes that cut the model into different buckets: of those that do not, the first."""
    cuts = {size: [[len(b) for b in cut_of(rule, named, size)] for rule in rules_of(algorithm)] for size in sizes}
    return [size for i, size in enumerate(sizes) if cuts[size] not in [cuts[other] for other in sizes[:i]]]


def choices_of(algorithms: Sequence[Algorithm] | None, comm: Comm) -> list[Algorithm]:
    """Return the algorithms to choose from in this group: with nodes, between them as well."""
    named = [gradient_allreduce(), bytegrad()] if algorithms is None else algorithms
    if isinstance(named, Rule) or not isinstance(named, Sequence) or not named:
        raise TypeError(
            f"algorithms is a list of what may be chosen, such as [bk.algorithms.bytegrad()], not {named!r}"
        )
    choices = list(dict.fromkeys(named))
    for rule in rules_of(*choices):
        rule.stage.check(comm)
    if comm.hierarchical:
        choices += [between for each in choices if (between := by_nodes(each, comm)) is not None]
    return choices


def by_nodes(algorithm: Algorithm, comm: Comm) -> Algorithm | None:
    """The same between nodes, where that can be and is not so already."""
    if any(isinstance(rule.stage, Hierarchical) for rule in rules_of(algorithm)):
        return None
    try:
        between = hierarchical(algorithm)
        for rule in rules_of(between):
            rule.stage.check(comm)
    except (TypeError, ValueError):  # it needs shapes, or a graph of as many nodes is impossible
        return None
    return between


def compressors_in(value: Any) -> Iterator[Compressor]:
    """The compressors that algorithms name, each once."""
    yield from dict.fromkeys(_compressors(value))


def _compressors(value: Any) -> Iterator[Compressor]:
    if isinstance(value, Compressor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _compressors(each)
    elif is_dataclass(value):
        for f in fields(value):
            yield from _compressors(getattr(value, f.name))


def written(algorithm: Algorithm) -> str:
    """An algorithm as one writes it."""
    return ", ".join(repr(rule) for rule in rules_of(algorithm))


def counted(count: int, noun: str) -> str:
    """A number of things."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
