"""The part of an attachment that tuners use."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .engine import Engine


class Tunable:
    """The settings of an attachment that a tuner changes, and what it needs to know for that."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def setting(self) -> tuple[int, int]:
        """Return the present size of buckets in bytes and number of flows; `recut` changes them."""
        return self._engine.setup.bucket_bytes, self._engine.flows

    @property
    def tuned(self) -> dict[str, int] | None:
        """Return the `bucket_bytes` and `flows` that tuning found, if it has ended: part of the attachment's state."""
        return self._engine.tuned

    @tuned.setter
    def tuned(self, found: dict[str, int] | None) -> None:
        self._engine.tuned = found

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self._engine.runtime.comm.size

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters."""
        return self._engine.setup.device

    @property
    def names(self) -> dict[Tensor, str]:
        """Return the names of the trainable parameters."""
        return self._engine.setup.names

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each step from now on. Until `unlisten`, `join()` raises."""
        self._engine.listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Call `listener` no more."""
        if listener in self._engine.listeners:
            self._engine.listeners.remove(listener)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Collective."""
        gathered: list[Any] = self._engine.together("tuning", lambda comm: comm.gather_objects(value))
        return gathered
