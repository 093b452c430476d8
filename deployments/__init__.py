"""The parts of a server: models and their engine, the activation store, clients' code, and collecting in process.

HTTP is `serve_app`'s.
"""

import os

__version__ = "0.1.0"

# GNU OpenMP, which torch uses, reads this once, when it is loaded. By default a thread that waits for others keeps its
# core busy for milliseconds. Beside any other process it then takes that core from the thread it waits for.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
