"""What the benchmarks share: timing in turn, tables and results, models and prompts, servers and their load."""
