"""Readouts: small functions of one point that a server computes for every token; and fitted lenses.

`spec.py` has their description and the request's fields, `files.py` checks and stores uploaded files and reads those of
SAELens, and `values.py` computes on rows. In a replica, `resolver.py` finds what a request names; in its engine,
`reading.py` reads forward passes, `sequence.py` collects a sequence's values, and `gates.py` decides which rows meet a
condition.
"""
