"""The ranks of a group: the same ones until its end, or those of `bk.elastic`, which come and go."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NoReturn, Protocol


class Membership(Protocol):
    """The members of a group, as a `Comm` knows them and an attachment asks for them.

    Attributes:
        changes: ranks come and go, so that the group of the `Comm` changes.
        bodies: the bodies of `recoverable()` that have ended.
    """

    changes: ClassVar[bool]
    bodies: int

    def watch(self, monitor: Any) -> None:
        """Tell the monitor of an attachment, or of a hook, of ranks that are lost."""

    def start(self, engine: Any) -> None:
        """Start the engine of an attachment. Collective."""

    def ended(self, engine: Any) -> None:
        """Note that an attachment has ended."""

    def recoverable(self) -> AbstractContextManager[None]:
        """See `Attachment.recoverable`."""

    def leave(self) -> None:
        """See `Attachment.leave`."""

    def on_regroup(self, callback: Callable[[Any], None]) -> None:
        """See `Attachment.on_regroup`."""


class Fixed:
    """The membership of a group whose ranks stay the same."""

    changes: ClassVar[bool] = False
    bodies = 0

    def watch(self, monitor: Any) -> None:
        pass

    def start(self, engine: Any) -> None:
        engine.start(engine.take_from_rank_0, engine.begin)

    def ended(self, engine: Any) -> None:
        pass

    def recoverable(self) -> NoReturn:
        _refuse("recoverable()")

    def leave(self) -> NoReturn:
        _refuse("leave()")

    def on_regroup(self, callback: Callable[[Any], None]) -> NoReturn:
        _refuse("on_regroup()")


def _refuse(call: str) -> NoReturn:
    raise ValueError(f"{call} needs a group whose ranks come and go: comm=bk.elastic.join(…)")
