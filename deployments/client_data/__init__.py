"""What clients keep in a store besides runs: tensor files, readouts, fitted lenses and presets.

The store's process alone writes them (`activations/actors/store.py`). What readouts compute is in `readouts/`.
"""
