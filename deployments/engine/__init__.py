"""Continuous batching over a Hugging Face language model, with every activation open. No Ray in it."""

from deployments.engine.engine import Engine, Statistics
from deployments.engine.model import Model, UnsupportedModelError, load
from deployments.engine.request import GREEDY, Captured, Delta, Event, Finished, Request, Sampling

__all__ = [
    "GREEDY",
    "Captured",
    "Delta",
    "Engine",
    "Event",
    "Finished",
    "Model",
    "Request",
    "Sampling",
    "Statistics",
    "UnsupportedModelError",
    "load",
]
