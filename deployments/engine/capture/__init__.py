"""Capture: a ring on the device, and a buffer in host memory for each request.

Rows leave in chunks. Their sizes are known before anything is computed.
"""
