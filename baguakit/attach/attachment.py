"""What a user can ask of an attachment, and how to make one."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any

from torch import nn

from ..comm import Comm
from ..rules import Algorithm, Rule
from .consensus import consensus_distance, merge_
from .engine import Engine
from .plan import Plan, make_plan
from .report import Report, make_report


class Attachment:
    """Rules at work on a model; made by `attach`. A context manager: leaving it detaches."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules at work."""
        return self._engine.plan.rules

    @property
    def step(self) -> int:
        """Optimizer steps made since the attachment was."""
        return self._engine.clock.step

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients in the backward passes of the body, as with `DistributedDataParallel.no_sync`.

        The first backward outside averages what has been accumulated. Local.
        """
        clock = self._engine.clock
        before, clock.synchronising = clock.synchronising, False
        try:
            yield
        finally:
            clock.synchronising = before

    def merge(self) -> None:
        """Overwrite every parameter and floating buffer with its exact mean over all ranks. Collective.

        For evaluation and checkpoints, where ranks have weights of their own.
        """
        plan = self._engine.plan
        self._engine.together("merge()", lambda comm: merge_(plan.model, comm, plan.device))

    def consensus_distance(self) -> float:
        """How far apart the ranks' weights are: sqrt( (1/n) Σ_r ‖x_r − x̄‖² ), x̄ being their mean. Collective."""
        params = list(self._engine.plan.names)
        return float(self._engine.together("consensus_distance()", lambda comm: consensus_distance(params, comm)))

    def report(self) -> Report:
        """Bytes sent and seconds exposed, by rule and bucket, since the buckets were cut. Local; print it."""
        engine = self._engine
        return make_report(engine.routes, engine.tracks, engine.host, engine.clock.step - engine.since)

    def state_dict(self) -> dict[str, Any]:
        """What the rules remember: tensors by parameter name, and counters. Local.

        Each rank saves its own. The tensors are copies, which `torch.load(weights_only=True)` accepts. Waits for
        flights in the air, and saves what they bring; but those of free-running rules are left out.
        """
        return self._engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Local, but every rank calls it.

        The order of a resume is: attach, load the model, load the optimizer, and then this. Buckets may be cut
        otherwise. With another number of ranks what is elementwise is kept, averaged or zeroed as its stage declares,
        and the rest is made anew, which the log ("baguakit") says.
        """
        self._engine.load_state_dict(state)

    def detach(self) -> None:
        """Remove every hook, wait for what is in the air (weights under way are dropped), and close groups and threads.

        Free-running rules answer the other ranks until all have detached. Calling it again does nothing.
        """
        self._engine.finish()

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._engine.finish()
        else:
            self._engine.abandon(error)


def attach(
    model: nn.Module,
    optimizer: Any,
    *algorithms: Algorithm,
    comm: Comm | None = None,
    bucket_bytes: int = 25 << 20,
    broadcast: bool = True,
    scaler: Any = None,
    timeout: float | timedelta | None = None,
) -> Attachment:
    """Let algorithms work on a model while it trains. Nothing else changes: not the model, not the optimizer.

        with bk.attach(model, optimizer, bk.algorithms.bytegrad()):
            train()

    Collective: all ranks of the group attach the same, in the same order. An error on one rank is raised on all.

    Args:
        model: any module; its trainable parameters are on one device.
        optimizer: the optimizer; or a sequence of them, and a step ends when the last has stepped; or None for rules
            on gradients only.
        algorithms: what to do, such as `bk.algorithms.bytegrad()`: rules, or tuples of rules.
        comm: the group; None means all ranks. With a mesh, `hierarchical` algorithms know the nodes.
        bucket_bytes: parameters travel together in buckets of about this size.
        broadcast: begin with the weights, buffers and optimizer state of rank 0.
        scaler: the GradScaler in use, so that stages see gradients without its factor; weight rules want torch's
            `ShardedGradScaler`, with which all ranks skip a step together.
        timeout: seconds (or a timedelta) after which a flight is given up and the rank at fault is named; None: 600.

    Returns:
        An `Attachment`: a context manager, or call its `detach()`.

    Raises:
        ValueError, TypeError: something cannot work, or ranks attach differently; on every rank.
    """
    comm = Comm() if comm is None else comm
    if not isinstance(comm, Comm):
        raise TypeError(f"comm= takes a bk.Comm, not {type(comm).__name__}")

    def make() -> Plan:
        return make_plan(model, optimizer, algorithms, comm, bucket_bytes, timeout, scaler)

    return Attachment(Engine(make, comm, broadcast))
