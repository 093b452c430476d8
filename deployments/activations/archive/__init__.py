"""The archive: copies sealed segments to a bucket, and adds them to its manifest.

The manifest's format and reading a bucket are in `catalogue/`.
"""
