"""From logits to an answer: penalties and draws, grammars, logprobs, the logit lens, and text."""
