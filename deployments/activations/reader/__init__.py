"""Reading stored runs: as tensors, tables, training batches and Ray datasets."""
