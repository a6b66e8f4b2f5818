"""The callback for transformers. `Trainer`'s `DistributedDataParallel` stands aside for the attachment.

Gradients have been averaged when its backward returns, so it accumulates, clips, logs and saves as usual.
"""

# Mypy also runs where transformers is not installed: there, its classes are Any.
# mypy: disable-error-code="import-not-found, misc, override"

import glob
import logging
import os
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("BaguaCallback needs transformers: pip install 'transformers[torch]>=5'") from error

from ..attach import attach
from ..rules import rules_of


class BaguaCallback(TrainerCallback):
    """A callback for `transformers.Trainer` and its subclasses, in which algorithms of this package communicate.

    In a checkpoint each rank saves the state of its rules, and with rules on weights also its own weights and optimizer
    state; it resumes from these. At the end of training rules on weights leave the mean of all ranks.

    Args:
        algorithms: as in `bk.attach`, such as `bk.algorithms.bytegrad()`.
        options: `comm`, `bucket_bytes`, `timeout` and `weight` of `bk.attach`. The scaler is that of `Trainer`.

    Attributes:
        attachment: the latest `Attachment`; None before the first training.

    Raises:
        RuntimeError: training begins without a `DistributedDataParallel` around the model.
    """

    def __init__(self, *algorithms: Any, **options: Any) -> None:
        self.rules, self.options = rules_of(*algorithms), options
        self.attachment: Any = None
        self._differ = any(rule.what == "data" for rule in self.rules)  # the weights of ranks
        # Trainer gives its callbacks the model alone, so note what wraps it.
        self._wrappers = wrappers = weakref.WeakSet[nn.Module]()
        noted: Any = register_module_module_registration_hook(
            lambda module, name, child: wrappers.add(module) if isinstance(module, DistributedDataParallel) else None
        )
        weakref.finalize(self, noted.remove)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **kwargs: Any) -> None:
        """Attach the algorithms, and continue from the checkpoint that training resumes from."""
        wrapper = next((each for each in self._wrappers if each.module is model), None)
        if wrapper is None:
            raise RuntimeError(
                "BaguaCallback attaches to the DistributedDataParallel that Trainer makes, and there is none around "
                "this model; start with torchrun, on CPUs with ACCELERATE_USE_CPU=true, without FSDP and DeepSpeed"
            )
        scaler = getattr(optimizer, "scaler", None)
        self.attachment = attach(wrapper, optimizer, *self.rules, scaler=scaler, **self.options)
        here = os.path.dirname(part_of(args, state, 0))
        if parts := len(glob.glob("baguakit-*.pt", root_dir=here)):
            saved = torch.load(part_of(args, state, args.process_index % parts), weights_only=True)
            if "model" in saved:
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            self.attachment.load_state_dict(saved["attachment"])
        elif state.global_step:
            logging.getLogger("baguakit").warning("%s is missing: rules begin anew", part_of(args, state, 0))

    def on_save(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **kwargs: Any) -> None:
        saved = {"attachment": self.attachment.state_dict()}
        if self._differ:
            saved |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        path = part_of(args, state, args.process_index)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(saved, path)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if self._differ:
            self.attachment.merge()
        self.attachment.detach()


def part_of(args: Any, state: Any, rank: Any) -> str:
    return os.path.join(args.output_dir, f"checkpoint-{state.global_step}", f"baguakit-{rank}.pt")
