"""Process groups, and the messages over them. Other modules send nearly all messages by methods of a `Comm`."""

from .comm import Comm, check_comm
from .groups import HOSTS, check_device, members_of
from .own import abort_all
from .sending import FLAT, INTER, INTRA, SentFormat, to_device

__all__ = ["FLAT", "HOSTS", "INTER", "INTRA", "Comm", "SentFormat", "abort_all", "check_comm", "check_device"]
__all__ += ["members_of", "to_device"]
