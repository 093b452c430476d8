"""The JSON bodies of requests, as pydantic models.

They import neither Ray nor torch, because other processes parse large bodies with them.
"""
