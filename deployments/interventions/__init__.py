"""Interventions of a request, resolved: from the fields that a client sends to the edits that the engine makes.

`stored_tensors.py` fetches the tensors and rows that they name from the activation store.
"""
