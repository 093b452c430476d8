"""Capture points as data: their names, and the request fields that record and change them."""
