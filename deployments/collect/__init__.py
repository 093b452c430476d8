"""Activations of many prompts: read from a file, run through a model, stored as a session.

`collect(...)` is `python -m deployments.collect`; `docs/capture.md` has both.
"""

import deployments.installed  # noqa: F401 - before the packages that it asks for

# isort: split
from deployments.collect.collection import Collected, CollectError, collect

__all__ = ["CollectError", "Collected", "collect"]
