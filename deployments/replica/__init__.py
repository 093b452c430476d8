"""One model's replica: the Serve deployment around an engine.

It loads the model, admits jobs, delivers the engine's events, stores recorded rows, and exports metrics.
"""
