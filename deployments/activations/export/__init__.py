"""Runs in other formats. Reading the stored rows is in `reader/`."""

from typing import Literal

Format = Literal["pt", "safetensors", "npz", "parquet", "hf"]
