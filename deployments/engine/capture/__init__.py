"""Capture: a ring on the device, and a buffer in host memory for each request."""
