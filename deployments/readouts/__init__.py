"""Readouts: small functions of one point that a server computes for every token.

`checks.py` turns an uploaded file into a checked definition, `values.py` computes on rows, and `saelens.py` reads the
sparse autoencoders of SAELens. The fields of requests that use readouts are in `deployments.points`.
"""
