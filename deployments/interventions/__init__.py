"""Resolves a request's interventions: from the fields that a client sends to the engine's edits.

`stored_tensors.py` fetches tensors and rows that they refer to from the activation store.
"""
