"""The routes, a file for each subject, and the parameters and dependencies that they share.

A route checks, asks the backend, and answers; what it takes is in `schemas`.
"""
