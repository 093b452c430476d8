"""One model's replica: the Serve deployment, what it loads, and what it does around its engine.

It admits jobs, delivers what the engine says of them, stores what they record, and exports metrics.
"""
