"""Watchers of a launch: they see every access to memory and raise a Fault where it depends on chance."""

from .fresh import Fresh
from .races import Races
from .unwritten import Unwritten

__all__ = ["WATCHERS", "Fresh", "Races", "Unwritten"]
WATCHERS = (Races, Unwritten)
