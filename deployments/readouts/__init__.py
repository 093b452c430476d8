"""Readouts: small functions of one point that a server computes for every token.

`checks.py` takes a file that a client sent to a checked definition, `values.py` computes on rows, and `saelens.py`
reads the sparse autoencoders of SAELens. How requests use readouts is in `deployments.points`.
"""
