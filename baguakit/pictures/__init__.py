"""Plots: functions that return a matplotlib Figure.

| function                               | plot                                                                |
|----------------------------------------|---------------------------------------------------------------------|
| `consensus_decay(distances, size)`     | the distance from the mean by round, and the spectral gap's bound   |
| `error_histogram(x, *compressors)`     | the errors of compressors on a tensor                               |
| `score_by_bytes(curves)`               | the accuracy of training by the bytes sent                          |
| `roofline(measured)`                   | kernels compared to the speed of a copy, from `bench.roofline`      |
| `topology.Ring().draw(size)`           | the graph and the mixing matrix (every topology)                    |

The functions import matplotlib when they are called. Figures are independent of pyplot: `.savefig("decay.png")`; a
notebook displays them after `%matplotlib inline`. Colours are those of Okabe and Ito, which colour-blind readers can
distinguish; markers and dashes distinguish the lines in grey print.
"""

from .plots import consensus_decay, error_histogram, roofline, score_by_bytes

__all__ = ["consensus_decay", "error_histogram", "roofline", "score_by_bytes"]
