"""`attach` lets rules act on a model while it trains, and returns an `Attachment`, by which the user controls them."""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn

from ..arguments import Positive, checked
from ..comm import Comm, Weight, check_comm
from ..flights import Attached
from ..report import Report, Timeline, account, gathered, make_report, written
from ..rules import Algorithm, Rule
from .broadcast import consensus_distance, merge_
from .engine import Engine
from .hooks import Hooks
from .joining import joined
from .setup import make_setup


class Attachment(Attached):
    """Rules that work on a model; `attach` makes it. It is a context manager, whose exit detaches the rules."""

    _life: Engine

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Return the attached rules, in the order in which `attach` got them."""
        return self._life.setup.rules

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Only accumulate gradients in the backward passes of the body, as with `DistributedDataParallel.no_sync`.

        The first backward after the body averages the accumulated gradients. Local.
        """
        return self._life.clock.no_sync()

    def average_(self) -> None:
        """Average in place the gradients that the user has put into `.grad` without a backward. Collective.

            for p, g in zip(params, torch.autograd.grad(loss, params)):     # or torch.func.grad
                p.grad = g
            att.average_()
            optimizer.step()

        The rules on gradients act as after a backward. Gradients that the rules have averaged since the last step are
        unchanged. Without an attached optimizer, all gradients are averaged, and the call counts as a step.

        Raises:
            ValueError: there is no rule on gradients.
            RuntimeError: the attachment is detached.
        """
        engine = self._life
        if engine.runtime.over:
            raise RuntimeError("average_() averages with the groups of the attachment; call it before it is detached")
        if not engine.backward.runners:
            raise ValueError("average_() averages gradients by rules on gradients, and this attachment has none")
        made = {p for each in engine.landings.values() for p in each.strange(engine.backward.touched)}
        if not engine.landings:
            made = {p for p in engine.setup.names if p.grad is not None}
        engine.backward.average(made)

    @checked
    def join(
        self, divide_by_initial_world_size: bool = True, throw_on_early_termination: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Let ranks run out of batches at different times, as with `DistributedDataParallel.join`. Collective.

            with att.join():
                for x, y in batches:            # any number of batches, also none
                    ...

        All ranks call it. A rank whose body has ended takes part in the exchanges of the rules until all bodies have
        ended: it sends zero gradients for rules on gradients, and its unchanged weights for rules on weights. At the
        end, rules on gradients give all ranks the weights, buffers and optimizer state of a rank that trained longest.
        With rules on weights, each rank keeps its own weights; call `merge()` to average them. `step` also counts steps
        that only other ranks make; a learning-rate scheduler does not. An exception in the body ends the attachment on
        all ranks. Gradients that a rank has accumulated under `no_sync` when it runs out are not averaged. A rank
        that has run out takes no part in collectives of the model itself, such as those of SyncBatchNorm.

        Args:
            divide_by_initial_world_size: divide summed gradients by the number of all ranks, so that batches have equal
                weights; False: by the number of ranks that still train. Rules on weights do not accept False. If
                numbers weigh ranks, it is the sum of these. If functions do, a rank without batches has weight 0.
            throw_on_early_termination: raise a RuntimeError on all ranks, as soon as they detect that a rank has run
                out of batches; training may continue after the error.

        Raises:
            ValueError: a rule does not support join (a free-running rule needs none), or the group is elastic.
            RuntimeError: the attachment is detached, or the call is inside another `join()`.
        """
        return joined(self._life, divide_by_initial_world_size, throw_on_early_termination)

    def merge(self) -> None:
        """Overwrite every parameter, and every dense non-integer buffer, with its mean over all ranks. Collective.

        Use it before evaluation and checkpoints if the weights differ between ranks.
        """
        setup = self._life.setup
        self._life.together("merge()", lambda comm: merge_(setup.model, comm, setup.device), meet=True)

    def consensus_distance(self) -> float:
        """Return √((1/n) Σ_r ‖x_r − x̄‖²) over n ranks: x_r are the weights of rank r, x̄ is their mean. Collective."""
        distance = partial(consensus_distance, list(self._life.setup.names))
        return float(self._life.together("consensus_distance()", distance, meet=True))

    def report(self) -> Report:
        """Return a report of bytes, formats and exposed seconds, by rule and bucket, since buckets were made. Local.

        Print the report, or log its `scalars()`. The call does not wait: only flights that have ended are timed.
        """
        return make_report(self._life)

    def compression_error(self) -> tuple[float, ...]:
        """Return the relative compression error  ε = √( Σ ‖x − Q(x)‖² / Σ ‖x‖² )  of each of `rules`. Local.

        Q is the compressor. The sums are over all x that this rank compressed in the latest flight of each bucket; x
        includes the error that error feedback added. The first call starts the measurement and returns NaN. For a rule
        that compresses nothing, ε is always NaN. The measurement reads the values once more in each flight; without
        error feedback it also copies them in fp32. On CUDA, a call synchronises.
        """
        return tuple(runner.compression_error() for runner in self._life.runners)

    @checked
    def log(
        self, writer: Any, step: int | None = None, *, consensus: bool = False, compression: bool = False
    ) -> dict[str, float]:
        """Write the scalars of `report()` to TensorBoard or a similar logger, and return them.

        Local, and does not wait. With `consensus` it is collective. On CUDA, `consensus` and `compression` synchronise.

        Args:
            writer: an object with `add_scalar(name, value, step)`, like torch.utils.tensorboard.SummaryWriter. A rank
                without a writer passes None, and only gets the scalars.
            step: the step to log; None: the number of steps made.
            consensus: also write `baguakit/consensus_distance`.
            compression: also write `baguakit/rule_0/compression_error` (and 1, 2, …), for each rule that compresses.

        Raises:
            TypeError: the writer has no `add_scalar`.
        """
        scalars = self.report().scalars()
        if consensus:
            scalars["baguakit/consensus_distance"] = self.consensus_distance()
        if compression:
            errors = enumerate(self.compression_error())
            scalars |= {f"baguakit/rule_{i}/compression_error": e for i, e in errors if e == e}  # not NaN
        return written(scalars, writer, self.step if step is None else step)

    @checked
    def timeline(self, steps: Positive | None = None) -> Timeline:
        """Return a timeline of the latest steps of all ranks: `save` it for Perfetto. Collective.

        An attachment records its latest 100 steps, and the latest 100 flights of each bucket. Steps and flights that
        have not ended are left out. On CUDA, times are measured on the device, and a call synchronises.

        Args:
            steps: the number of latest steps, at least 1; None: all. Once detached, this raises a RuntimeError.
        """
        engine = self._life
        if engine.runtime.over:
            raise RuntimeError("a timeline is gathered from all ranks by the attachment; ask for it before it detaches")
        spans = account(engine.runtime.comm.rank, engine.runners, engine.log, steps)
        found: Timeline = engine.together("timeline()", partial(gathered, engine.setup.device, spans), meet=True)
        return found

    @checked
    def recut(self, bucket_bytes: Positive | None = None, flows: Positive | None = None) -> None:
        """Make buckets of another size, or use another number of flows (connections), and carry over the rules' state.

        Collective; call it between two steps. State that a stage cannot carry over is made anew, which is logged
        ("baguakit"). None leaves a setting unchanged. Raises a ValueError with free-running rules or an elastic group.
        """
        engine = self._life
        engine.clock.outside("recut()")
        if engine.comm.membership.changes:
            raise ValueError("a rank that joins would have other buckets; pass bucket_bytes to bk.attach on all ranks")
        size = engine.setup.bucket_bytes if bucket_bytes is None else bucket_bytes
        if any(rule.window == "free_running" for rule in self.rules):
            raise ValueError("with a free-running rule ranks are at different steps, and cannot make buckets together")
        engine.recut(size, engine.flows if flows is None else flows)

    @property
    def tunable(self) -> Engine:
        """Return the engine, whose settings a tuner such as `bk.tune.autotune` changes."""
        return self._life

    # Methods for a group of bk.elastic

    @property
    def ranks(self) -> int:
        """Return the number of ranks. It may change in a group of `bk.elastic.join`."""
        return self._life.comm.size

    def recoverable(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for one step: if a rank is lost, the other ranks lose only this step, and continue.

            while att.step < 10_000:
                with att.recoverable():
                    optimizer.zero_grad()
                    loss(model(*next(batches))).backward()
                    optimizer.step()

        The body holds one optimizer step. If a rank has died, hangs or has left, the body ends early on all ranks, and
        the step is lost. The other ranks make a new group and continue from the end of the previous step. Ranks join
        and leave at the end of a body. The model, the optimizers and this attachment are restored. Other changes, such
        as those of a learning-rate scheduler, are not restored, so derive the learning rate from `step`.

        Raises:
            ValueError: the group is not from `bk.elastic.join`.
            Left: this rank has left, after `leave()` or SIGTERM. `Left` is a `SystemExit`.
        """
        return self._life.comm.membership.elastic("recoverable()").recoverable()  # type: ignore[no-any-return]

    def leave(self) -> None:
        """Leave the group at the end of the body of `recoverable()`, which then raises `bk.elastic.Left`. Local."""
        self._life.comm.membership.elastic("leave()").leave()

    def on_regroup(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(change)` whenever the group has changed, before the next step. Register it on all ranks.

        Args:
            callback: gets a `bk.elastic.Change`. All ranks call it at the same time, so it may be collective. On a rank
                that has joined a running training, `on_regroup` itself calls it, while the other ranks call theirs.
        """
        self._life.comm.membership.elastic("on_regroup()").on_regroup(callback)


def attach(
    model: nn.Module,
    optimizer: Any,
    *algorithms: Algorithm,
    comm: Comm | None = None,
    bucket_bytes: int | None = None,
    broadcast: bool = True,
    scaler: Any = None,
    timeout: float | timedelta | None = None,
    weight: Weight = None,
) -> Attachment:
    """Let algorithms work on a model while it trains. The model and the optimizer are not wrapped.

        with bk.attach(model, optimizer, bk.algorithms.bytegrad()):
            train()

    Collective: all ranks of the group attach the same algorithms, in the same order. An error on one rank is raised on
    all. If a rank dies, hangs, leaves or raises an error during training, the others raise a `bk.PeerError`, a
    RuntimeError that names the rank. The `Attachment` ends with its `with` block, or by `detach()`.

    Args:
        model: any module; its trainable parameters are on one device. Parameters may be frozen, unfrozen, added and
            removed during training, if all ranks do the same; a frozen parameter stays in its bucket, with its state.
        optimizer: one, or a sequence of optimizers (a step ends when all have stepped); None for rules on gradients.
        algorithms: such as `bk.algorithms.bytegrad()`: rules, or sums of rules.
        comm: the group; None: all ranks. The mesh of a `Comm` tells `hierarchical` which ranks share a node.
        bucket_bytes: the approximate size of a bucket. A bucket holds whole parameters, which are sent together. None:
            for gradients a quarter of all, but as much as sends 512 KiB, and from 1 to 25 MiB; for weights 25 MiB. A
            larger bucket costs less time of processors, and fewer delays of the network; with smaller ones more of the
            exchange overlaps backward. The first and the last buckets of gradients are smaller, where they may be.
        broadcast: begin with the weights, buffers and optimizer state of rank 0. Over gloo, what is equal is not sent.
        scaler: the GradScaler in use; stages then get unscaled gradients. Rules on weights need torch's
            `ShardedGradScaler`, with which all ranks skip a step together.
        timeout: seconds (or a timedelta) after which a flight fails and the rank at fault is named; None: 600.
        weight: of this rank in all means, such as its number of tokens, as a number, or as a function without arguments
            for weights that change. It is called once in each backward that averages gradients; without rules on
            gradients, once in each step. Rules on weights add up steps between exchanges. None: all ranks are equal.

    Raises:
        ValueError, TypeError: arguments contradict each other, or differ between ranks. Raised on every rank.
    """
    comm = Comm() if comm is None else comm
    check_comm(comm)
    given = model, optimizer, algorithms, comm, timeout, scaler, broadcast
    make = partial(make_setup, *given, weight=weight, bucket_bytes=bucket_bytes)
    with torch.inference_mode(False):  # else steps outside inference mode could not write to buckets
        engine = Engine(make, comm, timeout)
        Hooks(engine)
    return Attachment(engine)
