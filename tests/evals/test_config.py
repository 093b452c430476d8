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

from evals.config import STAGES, Config
from evals.gsm8k.options import OPTIONS, flag, parse_args, results_path


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--nope"], "--nope"),
        (["--sample", "3"], "--sample"),  # no abbreviations
        (["--samples", "0"], "--samples"),
        (["--parallel", "many"], "--parallel"),
        (["--parallel", "9999999999"], "--parallel"),
        (["--base-url", "localhost:8000"], "--base-url"),
        (["--base-url", "http://h:port/v1"], "--base-url"),
        (["--base-url", "http:///v1"], "--base-url"),
        (["--base-url", "http://h:1/v1 x"], "--base-url"),
        (["--temperature", "nan"], "--temperature"),
        (["--results-dir", ""], "--results-dir"),
        (["--dataset", "~nobody-of-this-name/x.jsonl"], "--dataset"),
        (["--config", "~nobody-of-this-name/x.yaml"], "--config"),
        (["--config", "absent.yaml"], "absent.yaml"),
        (["--mode", "some"], "--mode"),
        (["--variants", "calm,calm"], "twice"),
        (["--variants", "gloom"], "there is no gloom, only control"),
        (["--variants", "absent.yaml"], "--variants: absent.yaml"),
        (["--few-shot", "-1"], "--few-shot"),
        (["--capture", "{"], "--capture: not a JSON object"),
        (["--capture", '{"tags": {}}', "--collect-activations"], "--capture: tags: the evaluator sets this itself"),
        (["--capture", '{"layers": "all"}'], "--collect-activations"),
        (["--transfer-activations"], "--collect-activations"),
        (["--inline-activations", "8"], "--collect-activations"),
        (["--sweep", "layer=8,8"], "appears twice"),
        (["--sweep", "layer=1,1.5"], "whole number"),
        (["--sweep", "scale=0,-0"], "appears twice"),
        (["--sweep", "scale=1"], "--sweep needs --interventions"),
        (["--server-option", "threads=1"], "--server-option needs --serve"),
        (["--keep-running"], "--keep-running needs --serve"),
        (["--serve", "none"], "--serve names the model"),
        (["--serve", "m", "--server-option", "model=x"], "--serve names the model"),
        (["--serve", "m", "--server-option", "threads"], "'threads' must be written as name=value"),
        (["--serve", "m", "--server-option", "modle=x"], "modle: there is no such option: did you mean 'model'?"),
        (["--serve", "m", "--server-option", "num_replicas=0"], "--server-option num_replicas: must be greater"),
        (["--serve", "m", "--server-option", "activations_dir=~nobody-of-this-name/x"], "--server-option"),
        (["--serve", "m", "--stages", "deploy"], "--stages deploy needs --keep-running"),
        (["--stages", "deploy,reprot"], "'reprot' is not a stage; the stages are deploy,generate,report"),
    ],
)
def test_a_bad_option_is_refused_by_name(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_args(argv)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


EVERY = {
    "base_url": "http://127.0.0.1:9/v1",
    "model": "m",
    "dataset": "openai/gsm8k",
    "samples": 3,
    "seed": 4,
    "epochs": 2,
    "mode": "no-tools",
    "variants": ["control", "calm"],
    "few_shot": 2,
    "parallel": 5,
    "max_tokens": 6,
    "temperature": 0.5,
    "collect_activations": True,
    "capture": {"layers": [1, -1], "sites": ["mlp.output"], "tokens": {"last": 2}},
    "transfer_activations": True,
    "inline_activations": 10,
    "results_dir": "/tmp/r",
    "serve": "some/model",
    "keep_running": True,
    "stages": ["generate", "report"],
}


def test_a_file_says_what_the_flags_say(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(EVERY | {"session_id": "s", "server_options": {"threads": "1"}}))
    (tmp_path / "session.yaml").write_text("session_id: s")
    flags = ["--config", str(tmp_path / "session.yaml"), "--server-option", "threads=1"]
    for name, value in EVERY.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else json.dumps(value)
        flags += [flag(name)] if value is True else [flag(name), value if isinstance(value, str) else text]
    assert parse_args(["--config", str(path)]) == parse_args(flags)
    assert all(getattr(parse_args(flags), name) != Config.model_fields[name].default for name in EVERY)
    assert OPTIONS.keys() - EVERY.keys() == {"interventions", "sweep", "resume"}


def test_variants_come_from_those_that_ship_a_file_or_a_map(tmp_path: Path) -> None:
    shipped = parse_args(["--variants", "control,frustration,impatience,anxiety,collaborative,patience,calm"]).variants
    assert shipped["control"] == ""
    assert len(set(shipped.values())) == 7
    (tmp_path / "mine.yaml").write_text("control: ''\njoy: |\n  I am happy!\n")
    (tmp_path / "run.yaml").write_text("variants: {control: '', joy: I am happy!}\n")
    for argv in (["--variants", str(tmp_path / "mine.yaml")], ["--config", str(tmp_path / "run.yaml")]):
        assert parse_args(argv).variants == {"control": "", "joy": "I am happy!"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- 3", "--variants"),
        ("gloom: 3", "--variants: Input should be a valid string"),
        ("a: [", "mine.yaml"),
        ("a.b: x", "--variants: String should match pattern"),
        ("control: something\ngloom: a", "control has a text"),
    ],
)
def test_a_wrong_file_of_variants_is_refused(
    tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(SystemExit):
        parse_args(["--variants", str(tmp_path / "mine.yaml")])
    assert says in capsys.readouterr().err


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("samples: 3\nparallel: 4\ncollect_activations: true\n")
    config = parse_args(["--config", str(path), "--samples", "5", "--no-collect-activations"])
    assert (config.samples, config.parallel, config.collect_activations) == (5, 4, False)


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
    ("text", "named"),
    [
        ("results_dir: 5", "--results-dir: 5 is no path"),
        ("samples: true", "--samples: Input should be a valid integer"),
        ("parallel: 2.0", "--parallel: Input should be a valid integer"),
        ("timeout: true", "timeout: Input should be a valid number"),
        ("sample: 3\nmaxtokens: 4\n", "no option sample, maxtokens"),
        ("- samples\n", "not a map of options"),
        ("samples: [", "run.yaml"),
        ("resume: 'yes'", "--resume: Input should be a valid boolean"),
        ("rewards: {format: '1'}", "rewards: Input should be a valid number"),
        ("samples: !!int x", "--config"),
        ("session_id: 2026-02-31", "--config"),
    ],
)
def test_a_wrong_file_or_a_value_of_another_kind_is_refused_by_name_and_not_bent(
    tmp_path: Path, text: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        parse_args(["--config", str(tmp_path / "run.yaml")])
    assert ended.value.code == 2
    assert named in capsys.readouterr().err.partition("error: ")[2]


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


FILES = {"dataset": "x.jsonl", "few_shot": "f.jsonl"}


def test_files_are_those_of_the_directory_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse_args([part for name, value in FILES.items() for part in (flag(name), value)])
    assert {name: getattr(config, name) for name in FILES} == {n: str(tmp_path / value) for n, value in FILES.items()}
    assert parse_args(["--dataset", "~/x.jsonl"]).dataset == os.path.expanduser("~/x.jsonl")
    assert [parse_args(["--dataset", name]).dataset for name in ("demo", "openai/gsm8k")] == ["demo", "openai/gsm8k"]


def test_a_ray_jobs_files_stay_those_that_each_job_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    config = parse_args([part for name, value in FILES.items() for part in (flag(name), value)])
    assert {name: getattr(config, name) for name in FILES} == FILES


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


def test_server_options_are_those_of_the_server_and_may_be_a_map() -> None:
    served = parse_args(
        ["--serve", "m", "--server-option", "num_replicas=2", "--server-option", "dtype=float32"]
    ).served
    assert (served.served_name, served.num_replicas, served.dtype) == ("m", 2, "float32")
    points = [{"name": "middle", "selector": "layers.2.output"}]
    config = Config(session_id="s", results_dir=Path("out"), serve="m", server_options={"savepoints": points})
    assert config.served.savepoints[0].name == "middle"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("archive=s3://id:s3cret@bucket/p", "S3's keys as AWS_ACCESS_KEY_ID"),
        ("archive=abfs://c@a.dfs.core.windows.net/p?account_key=s3cret", "those of other storage in the environment"),
        ("public_url=https://u:s3cret@host/v", "public_url: must be scheme://host"),
    ],
)
def test_a_key_that_results_would_show_is_refused_and_not_repeated(
    option: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--serve", "m", "--server-option", option])
    told = capsys.readouterr().err
    assert f"--server-option {option.partition('=')[0]}: " in told
    assert said in told
    assert "s3cret" not in told


def test_stages_run_in_their_own_order_and_all_of_them_by_default() -> None:
    assert parse_args([]).stages == STAGES == ("deploy", "generate", "report")
    assert parse_args(["--stages", "generate,deploy"]).stages == ("deploy", "generate")
