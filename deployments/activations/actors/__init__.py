"""The Ray actors: the store writes, the reader answers queries."""
