"""The API key that requests send."""

import os

from deployments.options import fits_header
from evals.config import EvalError


def api_key() -> str | None:
    """The server's key. It stays in the environment: options are shown in results and process lists.

    Raises:
        EvalError: no header can hold it; the text does not show it.
    """
    key = os.environ.get("OPENAI_API_KEY") or None
    if key and not fits_header(key):
        raise EvalError("OPENAI_API_KEY has characters that an HTTP header cannot hold")
    return key
