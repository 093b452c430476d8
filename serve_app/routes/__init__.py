"""The routes, one file for each subject, and their shared parameters and dependencies.

A route checks the request, calls the backend, and answers. The bodies are in `schemas`.
"""
