"""The actors: model replicas with their engine, and the activation store."""

__version__ = "0.1.0"
