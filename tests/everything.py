"""The list of all algorithms and all compressors, with small arguments. Tests that concern every one run over it.

`make test` runs most of them with one algorithm of each kind, which its rules tell (`kind`), and the slow tests with
all of them: see `others_slow`.

An entry is an expression, so that it can be a test's name and be sent to a rank: `made` evaluates it. What the package
exports and has no entry here is tested as it is by default; `test_everything.py` fails with the name of one that needs
arguments.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from tiers import slow_unless

import baguakit as bk
from baguakit.compressors import Compressor
from baguakit.rules import Algorithm, rules_of
from baguakit.stages import Stage
from baguakit.testing.training import averages_gradients as averages_gradients
from baguakit.testing.training import delayed as delayed
from baguakit.testing.training import exact as exact
from baguakit.testing.training import joins as joins
from baguakit.testing.training import on_weights as on_weights
from baguakit.testing.training import repeats
from baguakit.testing.training import scaler as scaler

# The first entry of an algorithm is its usual form. All work on 2 ranks or more.
ALGORITHMS = (
    "gradient_allreduce()",
    "gradient_allreduce(delay=1)",
    "bytegrad(MinMaxUInt8(block=64))",
    "bytegrad(MinMaxUInt8(block=64), error_feedback=True)",
    "bytegrad(MinMaxUInt8(block=64), error_feedback=True, delay=2)",
    "bytegrad(Sign(), error_feedback=True)",
    "bytegrad(BFloat16(), error_feedback=True)",
    "bytegrad(error=1e-3)",
    "bytegrad(error=0.02, error_feedback=True)",
    "qadam(3, compressor=MinMaxUInt8(block=64))",
    "qadam(3, compressor=MinMaxUInt8(block=64), error_feedback=True)",
    "power_sgd(rank=2)",
    "power_sgd(rank=1, warmup_steps=4)",
    "top_k(0.1)",
    "top_k(0.1, chunk=64, values=UInt2(), decay=0.9)",
    "ef21(TopK(0.1))",
    "ef21(MinMaxUInt8(block=64), momentum=0.5)",
    "decoupled_momentum(0.1)",
    "decoupled_momentum(0.1, 0.9, values=UInt2(), sign=False)",
    "signum()",
    "lion_vote()",
    "decentralized()",
    "decentralized(every=3)",
    "decentralized(order='atc')",
    "low_precision_decentralized()",
    "low_precision_decentralized(every=2)",
    "choco()",
    "choco(OnePeerExact(), gamma=1.0)",
    "gradient_tracking()",
    "exact_diffusion()",
    "exact_diffusion(FullyConnected())",
    "quasi_global_momentum()",
    "quasi_global_momentum(Ring(), nesterov=True)",
    "push_sum(Exponential())",
    "local_sgd(every=2)",
    "local_sgd(every=2, start=5)",
    "diloco(every=2)",
    "diloco(every=4, delay=2)",
    "diloco(every=3, optimizer=torch.optim.Adam, lr=0.01)",
    "diloco(every=4, fragments=3, delay=1)",
    "diloco(every=4, fragments=2, delay=1, mix=0.5)",
    "diloco(every=4, inner=ErrorFeedback(CompressedMean(UInt4(block=64))), delay=1, fragments=2, mix=0.0)",
    "async_model_average(warmup_steps=2)",
    "async_gossip()",
    "async_gossip(compressor=MinMaxUInt8(block=64))",
    "async_push_sum(Exponential())",
    "decoupled_diloco(every=2, quorum=1, lr=0.5)",
    "decoupled_diloco(every=4, fragments=2, lr=1.0)",
    "decoupled_diloco(every=BySpeed(4), lr=1.0)",
)

COMPRESSORS = (
    "MinMaxUInt8()",
    "MinMaxUInt8(block=64)",
    "MinMaxUInt8(block=64, stochastic=True)",
    "UInt4()",
    "UInt4(block=64, stochastic=True)",
    "UInt4(rotate=True)",
    "Uniform(5, block=64, stochastic=True)",
    "Float8()",
    "Float8(format='e5m2', block=64, stochastic=True)",
    "Sign()",
    "Sign(block=64)",
    "TopK(0.05)",
    "TopK(0.05, chunk=64, values=UInt2())",
    "BFloat16()",
    "Float16()",
)


def complete(listed: tuple[str, ...], exported: list[str]) -> tuple[str, ...]:
    """Return the entries listed, and one without arguments for each exported name that has none."""
    families = set(map(family, listed))
    return listed + tuple(f"{name}()" for name in exported if name not in families)


def family(expression: str) -> str:
    """Return the name of the function or class that an expression calls."""
    return expression.partition("(")[0]


ALGORITHMS = complete(ALGORITHMS, bk.algorithms.__all__)
COMPRESSORS = complete(COMPRESSORS, [name for name in bk.compressors.__all__ if name != "Compressor"])
NAMES: dict[str, Any] = {
    name: getattr(module, name)
    for module in (bk, bk.algorithms, bk.compressors, bk.stages, bk.topology)
    for name in module.__all__
} | {"torch": torch}


def made(expression: str) -> Any:
    """Return the algorithm, the compressor or the stage of an expression."""
    return eval(expression, dict(NAMES))


def usual(expressions: tuple[str, ...] = ALGORITHMS) -> dict[str, str]:
    """Return the first expression of each family."""
    first: dict[str, str] = {}
    for each in expressions:
        first.setdefault(family(each), each)
    return first


def kind(algorithm: Algorithm) -> frozenset[tuple[Any, ...]]:
    """Return what an attachment knows of an algorithm: algorithms of the same kind take the same way through it.

    Of each rule: its window, whether all ranks end alike, whether it remembers, and whether it lands in a later step.
    """
    return frozenset(
        (each.window, each.stage.same_on_all_ranks, each.stage.remembers(), each.delay > 0)
        for each in rules_of(algorithm)
    )


def of_each_kind(expressions: Iterable[str] = ALGORITHMS, kind_of: Callable[[Algorithm], Hashable] = kind) -> list[str]:
    """Return the first expression of each kind."""
    first: dict[Hashable, str] = {}
    for each in expressions:
        first.setdefault(kind_of(made(each)), each)
    return list(first.values())


def others_slow(expressions: Iterable[str] = ALGORITHMS, kind_of: Callable[[Algorithm], Hashable] = kind) -> list[Any]:
    """Return expressions as parameters of a test: all but the first of each kind are marked slow."""
    expressions = list(expressions)
    return slow_unless(of_each_kind(expressions, kind_of), expressions)


# Facts about an algorithm, read from its rules.


def stages(algorithm: Algorithm) -> list[Stage]:
    """Return the stages of all rules, and those that they hold."""
    found = [rule.stage for rule in rules_of(algorithm)]
    for stage in found:  # which grows
        found += stage.nested().values()
    return found


def runs_free(algorithm: Algorithm) -> bool:
    """Return whether a rule is free-running."""
    return not repeats(algorithm)


def windows(algorithm: Algorithm) -> frozenset[str]:
    """Return the windows of all rules."""
    return frozenset(rule.window for rule in rules_of(algorithm))


def compressors(dense: bool | None = None) -> list[Compressor]:
    """Return all compressors, or those that are dense, or those that are not."""
    return [each for each in map(made, COMPRESSORS) if dense is None or each.dense == dense]
