"""The actors behind the routes: models and their replicas, the activation store, clients' jobs, metrics.

Routes ask `Backend`; it asks the others.
"""
