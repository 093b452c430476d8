"""Examples of each property: the same few for each change, and many others now and then (see the Makefile)."""

from hypothesis import settings

settings.register_profile("few", max_examples=20, deadline=None, derandomize=True)
settings.register_profile("many", max_examples=200, deadline=None)
settings.load_profile("few")
