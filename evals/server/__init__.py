"""The server that is evaluated: starting it, recognizing it, asking it, and waiting for it when it is away.

All by HTTP.
"""
