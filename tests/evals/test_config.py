from pathlib import Path

import pytest
import yaml

from evals.config import Config
from evals.options import parse_args, results_path


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--nope"], "--nope"),
        (["--sample", "3"], "--sample"),  # no abbreviations
        (["--samples", "0"], "--samples"),
        (["--parallel", "many"], "--parallel"),
        (["--base-url", "localhost:8000"], "--base-url"),
        (["--session-id", "a/b"], "--session-id"),
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
