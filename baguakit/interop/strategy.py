"""The strategy for Lightning. `bk.attach` sets hooks on the model and does not wrap it.

Gradients have been averaged when Lightning's backward returns, so it accumulates, unscales, clips and logs as usual.
"""

# Mypy also runs where Lightning is not installed: there, classes of Lightning are Any.
# mypy: disable-error-code="import-not-found, misc, override"

import contextlib
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

try:
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError("BaguaStrategy needs Lightning: pip install 'lightning>=2.5'") from error

from .. import algorithms
from ..attach import Attachment, attach
from ..comm import Comm, Weight
from ..flights import differs_between_ranks
from ..rules import rules_of
from ..stages import Hierarchical

KEY = "baguakit"  # in a checkpoint


class BaguaStrategy(DDPStrategy):
    """A Lightning strategy for data parallelism, in which an algorithm of this package does the communication.

    If weights or state differ between ranks (gossip, local steps, error feedback), a checkpoint has several files: rank
    0 writes Lightning's file, and each other rank writes a file in the folder `ranks` beside it. A fit that resumes on
    the same number of ranks continues exactly. `validate` and `test` use rank 0's weights, as with Lightning's DDP; in
    a fit each rank validates its own. To use the mean of all ranks, call `trainer.strategy.attachment.merge()`.

    Args:
        algorithm: such as `bk.algorithms.bytegrad()`, or a sum of rules; or the name of one of
            `bk.algorithms`, which is called without arguments.
        bucket_bytes: the approximate size of a bucket, as in `bk.attach`.
        flight_timeout: seconds (or a timedelta) after which a flight fails and the rank at fault is named.
        weight: of this rank in means, as in `bk.attach`.
        options: options of `DDPStrategy` itself, not of the DDP wrapper: `process_group_backend`, `timeout`,
            `start_method`, `precision_plugin`, `checkpoint_io` and others.

    Attributes:
        attachment: the `Attachment` while the trainer fits, else None.

    Raises:
        ValueError, TypeError: there is no such algorithm, or an option is for the DDP wrapper, which is not used.
    """

    def __init__(
        self,
        algorithm: Any = "bytegrad",
        *,
        bucket_bytes: int | None = None,
        flight_timeout: float | timedelta | None = None,
        weight: Weight = None,
        **options: Any,
    ) -> None:
        if unknown := sorted(set(options) - OPTIONS):
            raise TypeError(f"BaguaStrategy does not wrap the model, and takes no {', '.join(unknown)}=")
        super().__init__(**options)
        if isinstance(algorithm, str):
            if algorithm not in algorithms.__all__:
                raise ValueError(f"there is no bk.algorithms.{algorithm}; there are {', '.join(algorithms.__all__)}")
            algorithm = getattr(algorithms, algorithm)()
        self.rules = rules_of(algorithm)
        self._attach = partial(attach, bucket_bytes=bucket_bytes, timeout=flight_timeout, weight=weight)
        self.attachment: Attachment | None = None

    # Training

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        module: Any = self.lightning_module
        if trainer.state.fn == TrainerFn.FITTING:
            scaler = getattr(self.precision_plugin, "scaler", None)
            self.attachment = self._attach(module, self.optimizers, *self.rules, comm=self._comm(), scaler=scaler)

    def configure_ddp(self) -> None:
        """Do nothing: the model is not wrapped."""

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Call `closure` (forward and backward) first and then step, because rules need gradients before the step."""
        result = closure()
        return super().optimizer_step(optimizer, lambda: result, model, **kwargs)

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate gradients."""
        return contextlib.nullcontext() if self.attachment is None else self.attachment.no_sync()

    def on_exception(self, exception: BaseException) -> None:
        """Detach at once without waiting for other ranks, and tell them the exception."""
        attachment, self.attachment = self.attachment, None
        if attachment is not None:
            attachment.__exit__(type(exception), exception, None)
        super().on_exception(exception)

    def teardown(self) -> None:
        attachment, self.attachment = self.attachment, None
        try:
            if attachment is not None:
                attachment.detach()
        finally:
            super().teardown()

    def _comm(self) -> Comm:
        if not any(isinstance(rule.stage, Hierarchical) for rule in self.rules):
            return Comm()
        shape = (self.num_nodes, self.num_processes)
        return Comm(mesh=init_device_mesh(self.root_device.type, shape, mesh_dim_names=("inter", "intra")))

    # Checkpoints

    # When a fit resumes, it first attaches, and then loads the model, the optimizers and the attachment.
    restore_checkpoint_after_setup = True

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write Lightning's file on rank 0, and a file on each other rank if weights or state differ between ranks."""
        if self.attachment is None or "optimizer_states" not in checkpoint:  # only weights are saved
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        differ, state = any(rule.what == "data" for rule in self.rules), self.attachment.state_dict()
        each = differ or differs_between_ranks(self.rules, state)
        checkpoint[KEY] = {"ranks": self.world_size, "each": each, "state": state}
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if each and self.global_rank > 0:
            part = checkpoint if differ else {KEY: checkpoint[KEY]}
            path = part_of(filepath, self.global_rank)
            self.checkpoint_io.save_checkpoint(part, path, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the content of Lightning's file. If each rank has one, a resumed fit also reads this rank's file."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        saved: Any = checkpoint.get(KEY)
        module: Any = self.lightning_module
        rank = self.global_rank % saved["ranks"] if saved and saved["each"] else 0
        if rank == 0 or module.trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        path = part_of(checkpoint_path, rank)
        try:
            return {**checkpoint, **super().load_checkpoint(path, *args, **kwargs)}
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{checkpoint_path} was saved in parts by {saved['ranks']} ranks, and {path} is missing"
            ) from error

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self.attachment is not None and KEY in checkpoint:
            self.attachment.load_state_dict(checkpoint[KEY]["state"])

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.global_rank > 0:
            self.checkpoint_io.remove_checkpoint(part_of(filepath, self.global_rank))


# DDPStrategy uses these options itself. It passes all other options to the DDP wrapper.
OPTIONS = {"accelerator", "checkpoint_io", "cluster_environment", "parallel_devices", "precision_plugin"}
OPTIONS |= {"process_group_backend", "start_method", "timeout"}


def part_of(filepath: Any, rank: int) -> str:
    """Return the path of a rank's file in a folder `ranks`, in which Lightning does not look for checkpoints."""
    path = os.fspath(filepath)
    folder, name = os.path.split(os.path.realpath(path) if os.path.islink(path) else path)
    return os.path.join(folder, "ranks", f"{name}.{rank}")
