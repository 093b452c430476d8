"""Copies of sealed files in a bucket."""
