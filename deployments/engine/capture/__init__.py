"""Recording: a ring on the device, and a buffer in host memory for each request.

Rows are handed out in pieces; the sizes are known before anything is computed.
"""
