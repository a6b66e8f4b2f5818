"""A backend of `torch.distributed` whose collectives fly compressed: `register()`, then `init_process_group("bagua")`.

`exact()` excepts a part of a program, and `report()` tells how each operation flew.
"""

import sys

from ..expressions import show_public
from .group import register
from .policy import Policy, Report, Row, exact, report

__all__ = ["Policy", "Report", "Row", "exact", "register", "report"]

show_public(sys.modules[__name__])
