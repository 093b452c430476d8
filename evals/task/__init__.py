"""The task: problems and prompts, one problem's turns with the model, and rewards of what it answered.

`rollouts.py` runs many at once in Ray Data.
"""
