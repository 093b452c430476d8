"""Where a model's files come from: a directory, the hub, a GGUF file, or a package of the index.

Nothing here imports torch before a file is converted.
"""
