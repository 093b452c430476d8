"""What requests record while they run: a ring on the device, and a buffer on the host for each request.

Rows are handed out in pieces; the sizes are known before anything is computed.
"""
