"""Capture points as data: their names, and what a request records, changes and reads there.

Nothing here reads a stored file or imports Ray.
"""
