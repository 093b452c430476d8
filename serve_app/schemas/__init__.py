"""The JSON bodies of requests, as pydantic models.

No Ray and no torch: other processes parse large bodies with them.
"""
