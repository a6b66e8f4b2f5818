"""Reports, timelines and scalars of an attachment."""

from .accounts import account, gathered
from .report import Report, Row, make_report, written
from .timeline import Timeline

__all__ = [
    "Report",
    "Row",
    "Timeline",
    "account",
    "gathered",
    "make_report",
    "written",
]
