"""The shipped model's tokenizer, and applications that several files of tests share."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from deployments.demo_model import WEIGHTS
from serve_app.http.keys import VARIABLE
from tests.conftest import CODE_OPTIONS
from tests.serve_app.keyed import IN_ENVIRONMENT, IN_FILE, ORIGIN


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(WEIGHTS)


@pytest.fixture(scope="session")
def keys_file(tmp_path_factory):
    """The file of keys of the application `keyed`."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(IN_FILE)
    return path


@pytest.fixture(scope="session")
def keyed(another_app, keys_file):
    """The root of an application on the shared store with keys from a file and from the environment.

    It is for pages of one origin, and runs clients' code.
    """
    options = [f"api_keys_file={keys_file}", f"cors_origins={ORIGIN}", "allow_client_code=true"]
    with another_app("keyed", *options, **{VARIABLE: IN_ENVIRONMENT}) as root:
        yield root


@pytest.fixture(scope="session")
def small_store(another_app, tmp_path_factory):
    """The root of an application with little room that runs clients' code, and its store's directory.

    The directory is open to a group.
    """
    activations = tmp_path_factory.mktemp("small") / "activations"
    activations.mkdir()
    activations.chmod(0o2750)
    options = (f"activations_dir={activations}", "max_client_store_bytes=22400", *CODE_OPTIONS)
    with another_app("small", *options) as root:
        yield root, activations


@pytest.fixture(scope="session")
def runs_code(small_store):
    """One application fewer than with the fixture of all tests."""
    return small_store[0]
