"""Attention of packed rows over pages of keys and values, by the fastest function that takes them.

`registration.py` is what transformers calls. On a CPU it calls the compiled kernel, elsewhere `triton_decode.py` for
single rows and `flash.py` for prompts, and `reference.py`, by torch's operations, for what these do not take.
"""
