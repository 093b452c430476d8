"""The Ray actors: the store, which writes, and the reader, which answers questions."""
