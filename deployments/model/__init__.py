"""One copy of a model's weights and its forward passes: KV memory, attention, hooks, logits of any layer."""
