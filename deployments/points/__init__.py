"""Capture points as data: their names, and the request fields that record, change and read them.

Nothing here reads a stored file or imports Ray.
"""
