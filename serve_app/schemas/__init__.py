"""The JSON bodies of requests, as pydantic models."""
