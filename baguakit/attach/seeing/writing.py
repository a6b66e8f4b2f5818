"""Scalars, for loggers."""

from collections.abc import Mapping
from typing import Any

from ...arguments import shown


def written(scalars: Mapping[str, float], writer: Any, step: int) -> dict[str, float]:
    """The scalars, after `writer.add_scalar(name, value, step)` for each, if there is a writer.

    Raises:
        TypeError: it has no `add_scalar`.
    """
    if writer is not None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(
                "writer is one with add_scalar(name, value, step), such as "
                f"torch.utils.tensorboard.SummaryWriter, and not {shown(writer)}; "
                "give another logger att.report().scalars()"
            )
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
    return dict(scalars)
