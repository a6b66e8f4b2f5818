"""Fixtures of the tests of `data`."""

from hypothesis import settings

settings.register_profile("busy", deadline=None)  # other processes may take the cores: time is no property here
settings.load_profile("busy")
