"""Chats as a model reads and writes them: templates, prompts, thoughts and tool calls, and grammars of answers.

All of it is learned from the model's own tokenizer and chat template.
"""
