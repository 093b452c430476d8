"""The routes, one file per subject, and the parameters and dependencies that they share.

A route checks the request, calls the backend, and answers. The bodies are in `schemas`.
"""
