"""Writers on the cluster's other nodes: their directories, and their reports to the store.

Writing a directory is in `writer/`; the nodes' records are in `state/`.
"""
