"""The places of a loaded model that points refer to: their modules, and the shapes of their values.

`architectures.py` has the tables; `points.py` resolves names to places.
"""
