"""Load-balanced samplers."""

from .load_balanced import LoadBalancedBatchSampler, LoadBalancedSampler

__all__ = ["LoadBalancedBatchSampler", "LoadBalancedSampler"]
