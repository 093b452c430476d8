"""Capture points as data: their names, and the request fields that record and change them.

Nothing here reads a stored file or imports Ray.
"""
