"""Runners: each launches and lands the buckets of one rule."""
