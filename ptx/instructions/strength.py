"""Strengths and scopes of accesses and fences: PTX ISA, section 8.5 "Operation types" and 8.6 "Scope".

weak        orders nothing, and races with an access to the same bytes that nothing orders
relaxed     races with no other access of the kind whose scope includes its thread; `.volatile` is `.relaxed.sys`
acquire     a read of what was released: what came before the release comes before what follows
release     a write: what came before it comes before what follows an acquire that reads it
"""

from functools import cache
from typing import NamedTuple

SCOPES = {"cta": 1, "cluster": 2, "gpu": 3, "sys": 4}
ORDERS = {
    "ld": ("weak", "relaxed", "acquire", "volatile"),
    "st": ("weak", "relaxed", "release", "volatile"),
    "atom": ("relaxed", "acquire", "release", "acq_rel"),
    "red": ("relaxed", "release"),
}


class Strength(NamedTuple):
    """An order, and the number of its scope; 0 where it is weak."""

    order: str
    scope: int

    @property
    def acquires(self) -> bool:
        return self.order in ("acquire", "acq_rel")

    @property
    def releases(self) -> bool:
        return self.order in ("release", "acq_rel")


WEAK = Strength("weak", 0)


@cache
def strength_of(opcode: str, modifiers: tuple[str, ...]) -> Strength | None:
    """Return the strength of an access; None if the manual allows no such modifiers."""
    known = ORDERS.get(opcode)
    if known is None:
        return WEAK  # an asynchronous copy
    orders = [each for each in modifiers if each in ("weak", "relaxed", "acquire", "release", "acq_rel", "volatile")]
    scopes = [each for each in modifiers if each in SCOPES]
    if len(orders) > 1 or len(scopes) > 1 or not {*orders} <= {*known}:
        return None
    if opcode in ("atom", "red"):
        return Strength((*orders, "relaxed")[0], SCOPES[(*scopes, "gpu")[0]])
    if orders in (["relaxed"], ["acquire"], ["release"]):
        return Strength(orders[0], SCOPES[scopes[0]]) if scopes else None
    if scopes:
        return None
    return Strength("relaxed", SCOPES["sys"]) if orders == ["volatile"] else WEAK
