"""The shipped model's tokenizer, and applications that several files of tests share."""

from __future__ import annotations

import contextlib
import json
import os
import shutil

import pytest
import ray
from transformers import AutoTokenizer

from deployments.activations.actors.store import connect
from deployments.chat.response_templates import LLAMA
from deployments.demo_model import WEIGHTS
from serve_app.http.keys import VARIABLE
from tests.serve_app.keyed import IN_ENVIRONMENT, IN_FILE, ORIGIN


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(WEIGHTS)


@pytest.fixture(scope="session")
def keyed(another_app, tmp_path_factory):
    """The root of an application on the shared store with keys from a file and from the environment.

    It is for pages of one origin, and runs clients' code.
    """
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(IN_FILE)
    options = [f"api_keys_file={path}", f"cors_origins={ORIGIN}", "allow_client_code=true"]
    with another_app("keyed", *options, **{VARIABLE: IN_ENVIRONMENT}) as root:
        yield root


@pytest.fixture(scope="session")
def small_store(another_app, other_template, tmp_path_factory):
    """The root of an application with little room and another template, and its store's directory, open to a group."""
    activations = tmp_path_factory.mktemp("small") / "activations"
    activations.mkdir()
    activations.chmod(0o2750)
    options = (f"activations_dir={activations}", "max_client_store_bytes=22400")
    options += (f"model={other_template}", "model_id=vitrine-demo")
    with another_app("small", *options) as root:
        yield root, activations


@pytest.fixture
def restart_store(served, eventually):
    """`restart_store()` kills the store's process; another one has taken its place when it returns."""
    store = connect(str(served.home / "activations"))

    def process():
        with contextlib.suppress(ray.exceptions.RayActorError):  # until it is up again
            return ray.get(store.__ray_call__.remote(lambda _: os.getpid()))

    def restart():
        before = process()
        ray.kill(store, no_restart=False)  # returns before the process has ended
        eventually(process, lambda now: now not in (None, before))

    return restart


@pytest.fixture(scope="session")
def other_template(tmp_path_factory):
    """The directory of the shipped model, whose tokenizer says that it writes calls as Llama 3 does.

    Its template is a chat's first message and what `chat_template_kwargs` says of `tone`.
    """
    directory = tmp_path_factory.mktemp("model") / "other-template"
    shutil.copytree(WEIGHTS, directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["response_template"]["fields"] = {"tool_calls": LLAMA, "content": {}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }} {{ tone }}")
    return directory
