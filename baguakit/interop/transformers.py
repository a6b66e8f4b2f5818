"""Algorithms in transformers:  Trainer(…, callbacks=[BaguaCallback(bk.algorithms.bytegrad())])

transformers is imported at the first use of `BaguaCallback`. Importing this module does not need it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .callback import BaguaCallback

__all__ = ["BaguaCallback"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from .callback import BaguaCallback

        return BaguaCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
