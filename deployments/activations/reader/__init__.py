"""Reading stored runs: as tensors, tables, training batches and Ray datasets.

The file format is in `segments/`; conversion to other formats is in `exports.py`.
"""
