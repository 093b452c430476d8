"""The shipped model's tokenizer, beside what serves the model."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from deployments.demo_model import WEIGHTS


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(WEIGHTS)
