"""The server's parts below HTTP: engine, replica, chat, points, activation store, and tools around them.

HTTP is in `serve_app`, the Python client in `vitrine`, and evaluations are in `evals`.
"""

import os

from vitrine import __version__ as __version__

# GNU OpenMP, which torch uses, reads this once, when it is loaded. By default a thread that waits for others keeps its
# core busy for milliseconds. Beside any other process it then takes that core from the thread it waits for.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
