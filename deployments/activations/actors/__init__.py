"""The Ray actors: the store writes, the reader answers queries.

They only make other modules callable: files are written in `writer/` and read in `reader/`.
"""
