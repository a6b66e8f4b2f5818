"""Compressed collectives: weights, tokens and activations in fewer bytes, over one group of ranks.

N is the number of values of a tensor, n that of ranks, and c(N) the bytes of N packed values.

    all-gather        each rank sends its N values                          (n − 1) c(N)
    reduce-scatter    each rank sends what the others add up, of N          (n − 1) c(N/n)
    all-to-all        each rank sends N_r values to rank r                  Σ_r c(N_r)
    broadcast         each rank but the last passes N values on             c(N)
    send              to one rank                                           c(N)

Bytes are what one rank sends. Values that would be more bytes packed (a handful of them) travel as they are. With
one rank nothing is sent and nothing is lost. Arguments that all share:

    x            a dense floating tensor; without a trailing `_` in the name of the primitive it is only read
    compressor   such as `compressors.MinMaxUInt8()`, one that keeps all places; None sends values as they are
    comm         the group
    out          a contiguous tensor in the dtype of `x` to write the result to and return, instead of a new one

All ranks give the same compressor, and tensors of the shapes and dtypes that fit each other. By hand nobody compares
them: over gloo a message of another length never arrives, and values that travel as they are may end a process. In a
stage of an attachment, a compressor that differs is named before anything is sent. An argument of another type raises a
TypeError, and one that does not fit a ValueError.
"""

from .differentiable import Differentiable, compressed_all_to_all
from .rows import (
    compressed_all_gather,
    compressed_broadcast_,
    compressed_receive_,
    compressed_reduce_scatter,
    compressed_send,
)

__all__ = [
    "Differentiable",
    "compressed_all_gather",
    "compressed_all_to_all",
    "compressed_broadcast_",
    "compressed_receive_",
    "compressed_reduce_scatter",
    "compressed_send",
]
