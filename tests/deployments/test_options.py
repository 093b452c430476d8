"""Invalid options are rejected by name."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from pydantic import ValidationError
from ray.serve.scripts import cli

import serve_app
from deployments.options import Options

AZURE = "account.dfs.core.windows.net/p"
URIS_WITH_KEYS = [
    "s3://id:s3cret@bucket/p",
    "s3://s3cret@bucket/p",
    "s3://key:se/cret@bucket/p",
    "s3://key:se?cret@bucket/p",
    "s3://key:se#cret@bucket/p",
    "s3://key:/cret@bucket/p",
    "s3://AKIA:s3cret/p",
    f"abfs://container:s3cret@{AZURE}",
    f"abfs://:s3cret@{AZURE}",
    f"abfs://container@{AZURE}?account_key=s3cret",
    f"abfs://container@{AZURE}?sig=s3cret&sv=2026",
    f"abfs://container@{AZURE}?connection_string=AccountKey%3Ds3cret",
    f"abfs://container@{AZURE}#s3cret",
    "s3://bucket/p?Access_Key=s3cret",
    "s3://bucket/p?session_token=s3cret",
    "s3://bucket/p?password=s3cret&region=x",
    "s3://bucket/p?proxy_options=http://u:s3cret%40proxy",
    "s3://bucket/p?endpoint_override=http://u:s3cret%40proxy",
    "s3://bucket/p?region=x;secret_key=s3cret",
    "s3://bucket/p?s3cret",
]
URIS_WITHOUT_KEYS = [
    f"abfs://container@{AZURE}",
    f"abfss://container@{AZURE}?credential_kind=environment",
    "s3://bucket/p?region=eu-west-1&endpoint_override=host:9000&scheme=http",
    "s3://bucket/p?endpoint_override=%5B::1%5D:9000&allow_bucket_creation=true",
    "s3://bucket/a%40b?region=us-east-1&role_arn=arn:aws:iam::1:role/store",
    "gs://anonymous@bucket/p",
    "hdfs://user@host:8020/p",
]
PUBLIC_URLS_WITH_KEYS = ["u:s3cret@host/v", "s3cret@host/v", "u:s3/cret@host", "host/v?token=s3cret", "host#s3cret"]
REFUSED = [
    *(({name: value}, name) for name, value in {"modle": "x", "num_replicas": "many", "dtype": "float8"}.items()),
    *(({name: value}, name) for name, value in {"num_replicas": 0, "attention": "lazy", "max_running": -1}.items()),
    *(({"archive": uri}, "archive\n.*AWS_ACCESS_KEY_ID") for uri in URIS_WITH_KEYS),
    *(({"archive": uri}, "must be the URI of a bucket, such as s3://") for uri in ("/data", "file:///data")),
    *(
        ({"activations_dir": uri}, "activations_dir=/data/activations archive=s3://bucket")
        for uri in ("file:///data", "s3://key:s3cret@bucket/p")
    ),
    ({"activation_dir": "s3://key:s3cret@bucket"}, "activation_dir"),
    *(
        ({"autoscaling": fields}, f"autoscaling\n.*{said}")
        for fields, said in [
            ({"max_replica": 2}, "no field max_replica: did you mean 'max_replicas'"),
            ({"min_replicas": -1, "upscale_delay_s": "soon"}, "min_replicas: must be .*; upscale_delay_s: must be"),
            ('{"min_replicas": 3, "max_replicas": 2}', "max_replicas .2. must be greater"),
        ]
    ),
    ({"autoscaling": {"max_replicas": 2}, "num_replicas": 2}, "either num_replicas or autoscaling"),
    ({"num_gpus": 1.5}, "num_gpus must be at most 1, or whole"),
    ({"models_dir": "here"}, "models_dir\n.*must be an absolute path"),
    *(
        ({"public_url": f"https://{end}"}, "public_url\n.*without a user, password, query or fragment")
        for end in PUBLIC_URLS_WITH_KEYS
    ),
]


def test_options_come_as_text_from_the_command_line():
    options = Options.model_validate({"model": "some/model", "num_replicas": "2", "num_gpus": "0.5"})
    assert (options.num_replicas, options.num_gpus, options.served_name) == (2, 0.5, "some/model")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"model": "/home/me/models/smollm2"}, "smollm2"),
        ({"model": "/home/me/models/smollm2/"}, "smollm2"),
        ({"model": "~/models/smollm2"}, "smollm2"),
        ({"model": "a/b", "adapter": "c/d"}, "a/b+c/d"),
        ({"model": "/models/b", "adapter": "/loras/d/"}, "b+d"),
        ({"model": "a/b", "adapter": "c/d", "model_id": "e"}, "e"),
        ({"model": "/models/SmolLM2.Q4_1.gguf"}, "SmolLM2.Q4_1"),
        ({"model": "/home/me/models/smollm2", "model_id": "/mine"}, "/mine"),
        ({"model": "org/smollm2"}, "org/smollm2"),
        ({"model": "/"}, "/"),
    ],
)
def test_a_model_is_served_by_the_last_name_of_its_path(given, name):
    assert Options.model_validate(given).served_name == name


WRONG = {"atention": "eager", "num_replicas": "many", "dtype": "f8", "archive": "s3://key:se/cret@bucket"}
SAID = [
    "atention: there is no such option: did you mean 'attention'?",
    "num_replicas: must be a valid integer",
    "dtype: must be 'auto', 'float32', 'bfloat16' or 'float16'",
    "archive: a URI must not contain keys",
    "python -m deployments.options_table",
]


def test_serve_run_tells_all_bad_options_on_one_line():
    done = CliRunner().invoke(
        cli, ["run", "serve_app:build_app", *(f"{name}={value}" for name, value in WRONG.items())]
    )
    assert done.exit_code == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert all(said in line for said in SAID)
    assert "pydantic" not in done.stderr
    assert "Traceback" not in done.stderr
    assert "cret" not in line


def test_serve_run_tells_of_a_missing_file_of_keys_on_one_line(tmp_path):
    done = CliRunner().invoke(cli, ["run", "serve_app:build_app", f"api_keys_file={tmp_path / 'none'}"])
    assert done.exit_code == 2
    assert f"No such file or directory: '{tmp_path / 'none'}'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("model", "said"), [("smollm2", "run `make smollm2`"), ("/nowhere/a.gguf", "there is no file /nowhere/a.gguf")]
)
def test_serve_run_tells_of_a_model_that_is_not_there_on_one_line(model, said, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where no Ray runs
    done = CliRunner().invoke(cli, ["run", "serve_app:build_app", f"model={model}", f"models_dir={tmp_path}"])
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_lists_and_objects_are_json_in_arguments():
    given = Options.model_validate({"monitors": '[{"readout": "bad", "above": 0.9, "for": 2}]', "savepoints": "[]"})
    assert (given.monitors[0].readout, given.monitors[0].rows, given.savepoints) == ("bad", 2, ())


def test_elsewhere_bad_options_are_one_error():
    with pytest.raises(ValueError, match="atention: there is no such option") as caught:
        serve_app.build_app({"atention": "eager", "savepoints": [{"nme": "a", "selector": "norm"}]})
    assert "savepoints.0.nme: there is no such option: did you mean 'name'?" in str(caught.value)


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=str)
def test_a_bad_option_is_refused_by_name_and_a_key_in_it_is_not_repeated(given, message):
    with pytest.raises(ValidationError, match=message) as caught:
        Options.model_validate(given)
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("archive", uri) for uri in URIS_WITHOUT_KEYS), ("public_url", "https://host:8443/below/a/%40path")],
)
def test_an_address_without_a_key_is_taken_as_it_is(name, value):
    assert getattr(Options.model_validate({name: value}), name) == value
