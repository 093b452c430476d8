"""The server under evaluation: starting and recognizing it, sending requests, waiting while it is away.

All by HTTP.
"""
