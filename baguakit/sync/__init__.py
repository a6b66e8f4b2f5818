"""Exact copies of a model's weights, kept up to date by sending the values that have changed, bit for bit.

    publisher = bk.sync.Publisher(trained, "/shared/weights")       # or a Comm: rank 0 publishes to all others
    publisher.publish()                                             # after every few steps

    subscriber = bk.sync.Subscriber(served, "/shared/weights")
    version = subscriber.update()                                   # whenever it suits

`changes` and `apply_` are the format alone, for programs with transports of their own.
"""

from ..expressions import show_public
from .packing import apply_, changes
from .versions import Publisher, Subscriber

__all__ = ["Publisher", "Subscriber", "apply_", "changes"]

show_public(__name__)
