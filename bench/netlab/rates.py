"""Rates in words, as `tc` spells them."""

import re

_UNITS = {"bit": 1, "kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}


def bits_per_second(rate: str) -> int:
    """The number in "500mbit", in bits per second.

    Raises:
        ValueError: it is no rate, or none that anything could pass at.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(k|m|g)?bit", rate.strip().lower()) if isinstance(rate, str) else None
    bits = round(float(found[1]) * _UNITS[f"{found[2] or ''}bit"]) if found else 0
    if bits < 8_000:
        raise ValueError(f'a rate is 8kbit or more, such as "500mbit" or "1gbit"; not {rate!r}')
    return bits


def bytes_per_second(rate: str) -> float:
    """The number in "500mbit", in bytes per second."""
    return bits_per_second(rate) / 8
