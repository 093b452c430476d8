"""Capture points: what places of a model are called, and what a request records, changes and looks at there.

Nothing here reads a stored file or imports Ray.
"""
