"""A model's chat format: templates, prompts, reasoning and tool calls, and grammars for answers."""
