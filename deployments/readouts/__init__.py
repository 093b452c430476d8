"""Readouts: small functions of one point that a server computes for every token.

`spec.py` has their description and the request's fields, `files.py` checks and stores uploaded files, `values.py`
computes on rows, and `saelens.py` reads the sparse autoencoders of SAELens. In a replica, `cache.py` and `resolver.py`
find what a request names; in its engine, `reading.py` reads forward passes, `sequence.py` collects a sequence's values,
and `gates.py` decides which rows meet a condition.
"""
