"""From logits to an answer: penalties and draws, grammars, logprobs, the logit lens, and text.

`sampling.py` draws the tokens of a step; `sampling_state.py` holds the state of each sequence.
"""
