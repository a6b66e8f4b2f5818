"""Algorithms in Lightning:  Trainer(strategy=BaguaStrategy("bytegrad"), devices=2)

Lightning is imported at the first use of `BaguaStrategy`. Importing this module does not need Lightning.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .strategy import BaguaStrategy

__all__ = ["BaguaStrategy"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from .strategy import BaguaStrategy

        return BaguaStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
