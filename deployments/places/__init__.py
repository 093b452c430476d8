"""The places of a loaded model that points name: which modules they are, and what stands there in a forward.

`architectures.py` has the tables; `points.py` resolves names to places.
"""
