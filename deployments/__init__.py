"""The server's parts below HTTP: engine, replica, chat, points, activation store, and tools around them.

HTTP is in `serve_app`, the Python client in `vitrine`, and evaluations are in `evals`.
"""

__version__ = "0.1.0"
