import contextlib
import io
import json
import os
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from evals.config import Config
from evals.gsm8k.options import flag, parse_args, results_path


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--nope"], "--nope"),
        (["--sweep", "layer=8,8"], "appears twice"),
        (["--sweep", "scale=0"], "changes nothing"),
        (["--sweep", "layer=1,1.5"], "whole number"),
        (["--sweep", "scale=0,-0"], "appears twice"),
        (["--sample", "3"], "--sample"),  # no abbreviations
        (["--samples", "0"], "--samples"),
        (["--parallel", "many"], "--parallel"),
        (["--parallel", "16", "--workers", "9"], "must be a multiple of --workers"),
        (["--base-url", "localhost:8000"], "--base-url"),
        (["--base-url", "http://h:port/v1"], "--base-url"),
        (["--base-url", "http:///v1"], "--base-url"),
        (["--base-url", "http://h:1/v1 x"], "--base-url"),
        (["--temperature", "nan"], "--temperature"),
        (["--timeout", "nan"], "--timeout"),
        (["--timeout", "inf"], "--timeout"),
        (["--max-outage", "nan"], "--max-outage"),
        (["--max-outage", "-1"], "--max-outage"),
        (["--wait-healthy", "nan"], "--wait-healthy"),
        (["--rewards", "format=nan"], "--rewards"),
        (["--parallel", "9999999999"], "--parallel"),
        (["--results-dir", ""], "--results-dir"),
        (["--dataset", "~nobody-of-this-name/x.jsonl"], "--dataset"),
        (["--config", "~nobody-of-this-name/x.yaml"], "--config"),
        (["--session-id", "a/b"], "--session-id"),
        (["--steer", "control"], "need --interventions"),
        (["--mode", "some"], "--mode"),
        (["--layers", "1,x", "--sites", "mlp.output", "--collect-activations"], "--layers"),
        (["--layers", "1", "--collect-activations"], "--sites"),
        (["--points", "p", "--layers", "1", "--sites", "s", "--collect-activations"], "not both"),
        (["--points", "p"], "--collect-activations"),
        (["--split", "train"], "--split"),
        (["--variants", "calm,calm"], "twice"),
        (["--variants", "a.b"], "--variants"),
        (["--few-shot", "-1"], "--few-shot"),
        (["--few-shot-file", "x.jsonl"], "--few-shot"),
        (["--rule", "loose"], "--rule"),
        (["--rewards", "format"], "write format=1"),
        (["--rewards", "format=much"], "--rewards"),
        (["--tokens", "some", "--collect-activations"], "--tokens"),
        (["--tokens", "last:0", "--collect-activations"], "--tokens"),
        (["--tokens", "last"], "--collect-activations"),
        (["--transfer-activations"], "--collect-activations"),
        (["--inline-activations", "8"], "--collect-activations"),
        (["--config", "absent.yaml"], "absent.yaml"),
    ],
)
def test_a_bad_option_is_refused_by_name(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_args(argv)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_lists_are_given_with_commas() -> None:
    config = parse_args(["--layers", "1,2", "--sites", "mlp.output, attention.output", "--collect-activations"])
    assert config.layers == (1, 2)
    assert config.sites == ("mlp.output", "attention.output")
    assert parse_args(["--layers", "all", "--sites", "a", "--collect-activations"]).layers == "all"


def test_weights_are_given_by_name() -> None:
    config = parse_args(["--rewards", "correctness=1, format=0.2,my.module:function=-1"])
    assert config.rewards == {"correctness": 1.0, "format": 0.2, "my.module:function": -1.0}


EVERY = {
    "base_url": "http://127.0.0.1:9/v1",
    "model": "m",
    "dataset": "openai/gsm8k",
    "split": "train",
    "samples": 3,
    "seed": 4,
    "mode": "no-tools",
    "variants": ["control", "calm"],
    "variants_file": "v.yaml",
    "few_shot": 2,
    "few_shot_file": "f.jsonl",
    "parallel": 5,
    "max_tokens": 6,
    "max_turns": 7,
    "temperature": 0.5,
    "timeout": 8.0,
    "retries": 9,
    "max_outage": 12.0,
    "rule": "flexible",
    "rewards": {"correctness": 1.0, "tool_use": 0.5},
    "collect_activations": True,
    "layers": [1, -1],
    "sites": ["mlp.output"],
    "tokens": "last:2",
    "transfer_activations": True,
    "inline_activations": 10,
    "session_id": "s",
    "results_dir": "/tmp/r",
    "wait_healthy": 11.0,
}


def test_a_file_says_what_the_flags_say(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(EVERY))
    flags: list[str] = []
    for name, value in EVERY.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, dict):
            flags += [flag, ",".join(f"{reward}={weight}" for reward, weight in value.items())]
        elif isinstance(value, list):
            flags += [flag, ",".join(map(str, value))]
        else:
            flags += [flag] if value is True else [flag, str(value)]
    assert parse_args(["--config", str(path)]) == parse_args(flags)
    assert all(getattr(parse_args(flags), name) != Config.model_fields[name].default for name in EVERY)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("samples: 3\nparallel: 4\ncollect_activations: true\n")
    config = parse_args(["--config", str(path), "--samples", "5", "--no-collect-activations"])
    assert (config.samples, config.parallel, config.collect_activations) == (5, 4, False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sample: 3\nmaxtokens: 4\n", "no option sample, maxtokens"),
        ("- samples\n", "not a map of options"),
        ("samples: [", "run.yaml"),
        ("samples: 0\n", "--samples"),
    ],
)
def test_a_wrong_file_is_refused_by_name(
    tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(SystemExit):
        parse_args(["--config", str(tmp_path / "run.yaml")])
    assert says in capsys.readouterr().err


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**300, 10**400)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=5)
    | st.dates(date(1990, 1, 1))
    | st.datetimes(datetime(1990, 1, 1))
    | st.sampled_from(["~nobody-of-this-name/x", "a\0b", "http://u:p@h/v1", "all", "1,2", "format=1", "none", "last:3"])
)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(SCALARS, SCALARS, max_size=2)
# What some values are refused by.
ALSO = {"resume": "--results-dir", "stages": "--results-dir"}


@pytest.mark.parametrize("name", sorted(Config.model_fields))
@settings(max_examples=settings().max_examples // 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=VALUES)
@example(value=True)
@example(value=2.0)
@example(value=5)
@example(value="")
@example(value=[[]])
@example(value={"x": []})
def test_whatever_a_file_gives_an_option_it_is_taken_or_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({name: value}), encoding="utf-8")
    config, code, said = parsed("--config", "run.yaml")
    if config is None:
        assert code == 2
        assert flag(name) in said or ALSO.get(name, "--config run.yaml") in said
    else:
        assert Config.model_validate(json.loads(config.model_dump_json())) == config  # as config.json keeps it


def parsed(*argv: str) -> tuple[Config | None, object, str]:
    """The options, or the status and the refusal."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parse_args(argv), None, ""
    except SystemExit as ended:
        return None, ended.code, said.getvalue()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("results_dir: 5", "--results-dir: 5 is no path"),
        ("samples: true", "--samples: Input should be a valid integer"),
        ("parallel: 2.0", "--parallel: Input should be a valid integer"),
        ("timeout: true", "--timeout: Input should be a valid number"),
        ("resume: 'yes'", "--resume: Input should be a valid boolean"),
        ("layers: [1.0]", "--layers: Input should be a valid integer"),
        ("rewards: {format: '1'}", "--rewards: Input should be a valid number"),
        ("server_options: 3", "--server-option: Input should be a valid dictionary"),
        ("stages: 3", "--stages: choose from"),
        ("samples: !!int x", "--config"),
        ("session_id: 2026-02-31", "--config"),
    ],
)
def test_a_value_of_another_kind_is_refused_and_not_bent(
    tmp_path: Path, line: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(line)
    with pytest.raises(SystemExit) as ended:
        parse_args(["--config", str(tmp_path / "run.yaml")])
    assert ended.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "url",
    ["http://user:s3cret@h:1/v1", "http://s3cret@h/v1", "http://h/v1?key=s3cret", "http://h/v1#s3cret"]
    + ["http://user:p#s3cret@h/v1", "http://h/s3cret@h/v1"],
)
def test_an_address_with_a_secret_is_refused_without_repeating_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--base-url", url])
    said = capsys.readouterr().err
    assert "--base-url: must not hold a user, a password or a query: give a key by OPENAI_API_KEY" in said
    assert "s3cret" not in said


FILES = {"dataset": "x.jsonl", "variants_file": "v.yaml", "few_shot_file": "f.jsonl"}


def test_files_are_those_of_the_directory_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = [part for name, value in FILES.items() for part in (flag(name), value)]
    config = parse_args([*given, "--few-shot", "1"])
    assert {name: str(getattr(config, name)) for name in FILES} == {
        name: str(tmp_path / value) for name, value in FILES.items()
    }
    assert parse_args(["--dataset", "~/x.jsonl"]).dataset == os.path.expanduser("~/x.jsonl")
    assert [parse_args(["--dataset", name]).dataset for name in ("demo", "openai/gsm8k")] == ["demo", "openai/gsm8k"]


def test_a_ray_jobs_files_stay_those_that_each_job_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    given = [part for name, value in FILES.items() for part in (flag(name), value)]
    config = parse_args([*given, "--few-shot", "1"])
    assert {name: str(getattr(config, name)) for name in FILES} == FILES


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '"text"', "{}", '{"config": []}', '{"config": 5}', "\0"])
def test_a_config_of_an_earlier_run_that_is_none_is_said_to_be_none(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SystemExit):
        parse_args(["--resume", "--results-dir", str(tmp_path)])
    assert "--" in capsys.readouterr().err.splitlines()[-1]


def test_results_lie_below_the_directory_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert results_path(None, "run") == tmp_path / "results" / "run"
    assert results_path("mine", "run") == tmp_path / "mine"
    assert results_path("/data/mine", "run") == Path("/data/mine")


def test_a_ray_jobs_results_outlive_its_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.setenv("VITRINE_HOME", str(tmp_path))
    assert results_path(None, "run") == tmp_path / "results" / "run"
    assert results_path("/data/mine", "run") == Path("/data/mine")
    with pytest.raises(ValueError, match="--results-dir mine: relative to a Ray job's working directory"):
        results_path("mine", "run")
    monkeypatch.delenv("VITRINE_HOME")
    assert results_path(None, "run") == Path.home() / ".vitrine" / "results" / "run"
