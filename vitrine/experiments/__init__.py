"""Experiments of one call each, as parts of `Server`, and their results.

Sending requests is in `connection/`; reading stored runs is in `runs/`.
"""
