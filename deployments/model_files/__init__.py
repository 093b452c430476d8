"""Sources of a model's files: a directory, the hub, a GGUF file, or a package of the index.

Nothing here imports torch before a file is converted.
"""
