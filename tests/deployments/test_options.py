"""An operator's mistake is refused by the option's name."""

from __future__ import annotations

import inspect

import pytest
from pydantic import ValidationError

import serve_app
from deployments.options import Options


@pytest.mark.parametrize(
    "given",
    [
        {"modle": "x"},
        {"num_replicas": "many"},
        {"num_replicas": 0},
        {"dtype": "float8"},
        {"attention": "lazy"},
        {"max_running": -1},
    ],
)
def test_an_unknown_or_bad_option_is_refused_by_name(given):
    with pytest.raises(ValidationError, match=next(iter(given))):
        Options.model_validate(given)


def test_options_come_as_text_from_the_command_line():
    options = Options.model_validate({"model": "some/model", "num_replicas": "2", "num_gpus": "0.5"})
    assert (options.num_replicas, options.num_gpus, options.served_name) == (2, 0.5, "some/model")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"model": "/home/me/models/smollm2"}, "smollm2"),
        ({"model": "/home/me/models/smollm2/"}, "smollm2"),
        ({"model": "~/models/smollm2"}, "smollm2"),
        ({"model": "/models/SmolLM2.Q4_1.gguf"}, "SmolLM2.Q4_1"),
        ({"model": "/home/me/models/smollm2", "model_id": "/mine"}, "/mine"),
        ({"model": "org/smollm2"}, "org/smollm2"),
        ({"model": "/"}, "/"),
    ],
)
def test_a_model_is_served_by_the_last_name_of_its_path(given, name):
    assert Options.model_validate(given).served_name == name


def test_serve_run_checks_the_options_because_the_builder_names_their_type():
    (parameter,) = inspect.signature(serve_app.build_app).parameters.values()
    assert parameter.annotation is Options


@pytest.mark.parametrize("secret", ["se/cret", "se?cret", "se#cret", "/cret"])
def test_a_key_that_is_not_escaped_is_refused_and_not_repeated(secret):
    with pytest.raises(ValidationError, match="%2F.*environment variables") as caught:
        Options.model_validate({"activations_dir": f"s3://key:{secret}@bucket/p"})
    assert "activations_dir" in str(caught.value)
    assert "cret" not in str(caught.value)


def test_a_bad_option_is_refused_without_the_keys_in_it():
    with pytest.raises(ValidationError, match="activation_dir") as caught:
        Options.model_validate({"activation_dir": "s3://key:secret@bucket"})
    assert "secret" not in str(caught.value)


def test_a_uri_of_a_directory_is_refused_since_a_path_says_the_same():
    with pytest.raises(ValidationError, match="must be a path, such as /data"):
        Options.model_validate({"activations_dir": "file:///data"})


def test_object_storage_with_escaped_keys_is_taken_as_it_is():
    uri = "s3://key:se%2Fcret@bucket/p?region=us-east-1&endpoint_override=host:9000"
    assert Options.model_validate({"activations_dir": uri}).activations_dir == uri


@pytest.mark.parametrize(
    "end", ["u:s3cret@host/v", "s3cret@host/v", "u:s3/cret@host", "host/v?token=s3cret", "host#s3cret"]
)
def test_a_public_url_with_a_key_is_refused_and_not_repeated(end):
    with pytest.raises(ValidationError, match="without a user, password, query or fragment") as caught:
        Options.model_validate({"public_url": f"https://{end}"})
    assert "public_url" in str(caught.value)
    assert "cret" not in str(caught.value)


def test_a_public_url_is_taken_as_it_is():
    url = "https://host:8443/below/a/%40path"
    assert Options.model_validate({"public_url": url}).public_url == url
