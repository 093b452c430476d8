from pathlib import Path

import pytest

from evals.config import Config
from evals.gsm8k.options import parse_args
from evals.serving_config import STAGES


def parsed(*options: str) -> Config:
    return parse_args(["--results-dir", "out", *options])


def test_server_options_are_those_of_the_server() -> None:
    options = ["--server-option", "num_replicas=2", "--server-option", "dtype=float32"]
    served = parsed("--serve", "some/model", *options).served
    assert (served.model, served.served_name, served.num_replicas, served.dtype) == (
        "some/model",
        "some/model",
        2,
        "float32",
    )


def test_a_map_in_place_of_pairs_may_hold_more_than_text() -> None:
    points = [{"name": "middle", "selector": "layers.2.output"}]
    config = Config(session_id="s", results_dir=Path("out"), serve="m", server_options={"savepoints": points})
    assert config.served.savepoints[0].name == "middle"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--serve", "m", "--server-option", "modle=x"],
            "--server-option modle: there is no such option: did you mean 'model'?",
        ),
        (
            ["--serve", "m", "--server-option", "num_replicas=0"],
            "--server-option num_replicas: must be greater",
        ),
        (["--serve", "m", "--server-option", "threads"], "'threads' must be written as name=value"),
        (["--serve", "m", "--server-option", "model=x"], "--serve names the model"),
        (["--serve", "none"], "--serve names the model"),
        (["--serve", "m", "--server-option", "activations_dir=~nobody-of-this-name/x"], "--server-option"),
        (["--server-option", "threads=1"], "--server-option needs --serve"),
        (["--fresh"], "--fresh needs --serve"),
        (["--keep-running"], "--keep-running needs --serve"),
        (["--stages", "deploy,reprot"], "'reprot' is not a stage; the stages are deploy,configure,generate,report"),
        (["--serve", "m", "--stages", "deploy"], "--stages deploy needs --keep-running"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(*options)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("archive=s3://id:s3cret@bucket/p", "S3's keys as AWS_ACCESS_KEY_ID"),
        ("archive=s3://b/p?secret_key=s3cret", "S3's keys as AWS_ACCESS_KEY_ID"),
        ("archive=abfs://c@a.dfs.core.windows.net/p?account_key=s3cret", "those of other storage in the environment"),
        ("public_url=https://u:s3cret@host/v", "public_url: must be scheme://host"),
        ("public_url=https://host/v?token=s3cret", "public_url: must be scheme://host"),
    ],
)
def test_a_key_that_results_would_show_is_refused_and_not_repeated(
    option: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed("--serve", "m", "--server-option", option)
    told = capsys.readouterr().err
    assert f"--server-option {option.partition('=')[0]}: " in told
    assert said in told
    assert "s3cret" not in told


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/prefix?region=eu-west-1&endpoint_override=host:9000",
        "abfs://container@account.dfs.core.windows.net/p",
    ],
)
def test_a_bucket_is_taken_without_its_key(uri: str) -> None:
    assert parsed("--serve", "m", "--server-option", f"archive={uri}").served.archive == uri


def test_stages_run_in_their_own_order_and_all_of_them_by_default() -> None:
    assert parsed().stages == STAGES
    assert parsed("--stages", "report,configure").stages == ("configure", "report")
