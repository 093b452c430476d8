"""The actors: model replicas with their engine, and the activation store."""
