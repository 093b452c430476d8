"""The writer of a directory: open segments, group commit, recovery, deletion and retention.

The bytes of a segment are in `segments/`; writers on other nodes are in `nodes/`.
"""
