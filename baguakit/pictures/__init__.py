"""Pictures, where one would rather look than read: each a function that returns a matplotlib Figure.

| picture                                | of what                                                             |
|----------------------------------------|---------------------------------------------------------------------|
| `consensus_decay(distances, size)`     | how ranks approach their mean, and what the spectral gap promises   |
| `error_histogram(x, *compressors)`     | what compressors lose of a tensor                                   |
| `score_by_bytes(curves)`               | what training reaches for the bytes that it sends                   |
| `roofline(measured)`                   | kernels against the speed of a copy, as `bench.roofline` records it |
| `topology.Ring().draw(size)`           | who hears whom, and the mixing matrix (every topology)              |

matplotlib is imported when something is drawn. Figures stand alone (no pyplot): `.savefig("decay.png")`; in a notebook
they show themselves after `%matplotlib inline`. Colours are Okabe and Ito's, which the colour-blind tell apart; markers
and dashes tell the same things apart in grey print.
"""

from .consensus import consensus_decay
from .errors import error_histogram
from .kernels import roofline
from .scores import score_by_bytes

__all__ = ["consensus_decay", "error_histogram", "roofline", "score_by_bytes"]
