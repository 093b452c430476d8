"""Resolves a request's interventions: from the fields that a client sends to the engine's edits."""
