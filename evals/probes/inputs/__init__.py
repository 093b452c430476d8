"""What probes are trained on: stored runs with their labels, the rows that are read, and features made of them."""
