"""Process groups, and the messages over them. Other modules send nearly all messages by methods of a `Comm`."""

from .comm import Comm, check_comm
from .groups import HOSTS, Membership, check_device, lazy_group, members_of, on_all
from .own import SMALLEST, abort_all, let_go
from .sending import FLAT, INTER, INTRA, TAGS, Rider, SentFormat, backend_of, check_peer, device_of, to_device
from .weights import Weight, Weights, number, row_of, times_, weighed, weights_of, weights_over

__all__ = ["FLAT", "HOSTS", "INTER", "INTRA", "SMALLEST", "TAGS", "Comm", "Membership", "Rider", "SentFormat", "Weight"]
__all__ += ["Weights", "abort_all", "backend_of", "check_comm", "check_device", "check_peer", "device_of", "lazy_group"]
__all__ += ["let_go", "members_of", "number", "on_all", "row_of", "times_", "to_device", "weighed", "weights_of"]
__all__ += ["weights_over"]
