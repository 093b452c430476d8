"""The file format: Arrow schemas and metadata, checksums, reading and writing one segment.

Which segments exist is in `index/`; when they are written is in `writer/`.
"""
