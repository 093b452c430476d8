"""The inputs of probes: stored runs with their labels, their rows, and features made of them."""
