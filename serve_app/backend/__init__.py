"""The actors behind the routes: models and their replicas, the activation store, clients' jobs, metrics.

Routes call `Backend`, which calls the others.
"""
