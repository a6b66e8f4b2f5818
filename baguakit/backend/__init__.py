"""A backend of `torch.distributed` with compressed collectives. Call `register()`, then `init_process_group("bagua")`.

Inside `with exact():` collectives are exact. `report()` returns how each operation was sent.
"""

from ..expressions import show_public
from .group import register
from .policy import Policy, Report, Row, exact, report

__all__ = ["Policy", "Report", "Row", "exact", "register", "report"]

show_public(__name__)
