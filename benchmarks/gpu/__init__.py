"""The engine alone on a GPU, beside transformers; `gpu.md` beside this folder says how to measure.

It imports neither Ray nor nnsight, pyarrow or llguidance: a machine with torch and transformers is enough.
"""
