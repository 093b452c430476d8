"""A model's chat format: templates, prompts, reasoning and tool calls, and grammars for answers.

All of it is derived from the model's tokenizer and chat template.
"""
