"""Reports, timelines and scalars of an attachment."""

from .report import Report, Row, make_report, row_of, written
from .timeline import Timeline, account, gathered

__all__ = ["Report", "Row", "Timeline", "account", "gathered", "make_report", "row_of", "written"]
