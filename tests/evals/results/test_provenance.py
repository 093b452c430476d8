import copy
import json
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from fake_openai import FakeServer
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from evals.gsm8k.options import parse_args
from evals.results.provenance import Facts, checkout, differences, facts, resumed
from evals.server.answers import RequestFailed
from evals.task.problems import SCHEMA, ChosenProblems
from evals.task.prompts import Example, FewShot, Prompts

Change = Callable[[Facts], object]
FEW_SHOT = FewShot("/here/train.jsonl", (Example("e", "What is 1 + 1?", "#### 2"),))
REVISION = {"revision": "1" * 40}


def told(server: FakeServer, tmp_path: Path, *options: str) -> Facts:
    dataset = tmp_path / "x.jsonl"
    dataset.write_text("{}")
    config = parse_args(["--base-url", server.base_url, "--model", "fake/model", "--dataset", str(dataset), *options])
    problems = pa.Table.from_pylist([{"id": "a", "question": "q", "gold": "1"}], SCHEMA)
    return facts(config, Prompts({"control": ""}, FEW_SHOT), dataset, ChosenProblems(problems, 0))


def test_config_json_has_the_models_revision_and_all_that_the_server_tells_of_itself(
    server: FakeServer, tmp_path: Path
) -> None:
    server.structure = {"id": "fake/model", "points": []}
    server.told = REVISION | {"options": {"dtype": "bfloat16", "threads": 4}, "versions": {"torch": "2.13.0"}}
    found = told(server, tmp_path)
    assert found["model"]["revision"] == "1" * 40
    assert found["model"]["structure"] == server.structure
    assert found["server"]["options"] == {"dtype": "bfloat16", "threads": 4}
    assert found["server"]["versions"] == {"torch": "2.13.0"}
    assert found["server"]["health"]["loaded_models"] == ["fake/model"]
    assert found["versions"]["python"] == platform.python_version()
    assert found["config"]["max_outage"] == 600.0
    assert json.loads(json.dumps(found)) == found


def test_a_server_that_tells_nothing_is_no_error(server: FakeServer, tmp_path: Path) -> None:
    found = told(server, tmp_path)
    assert found["model"] == {"id": "fake/model", "object": "model", "structure": None}
    assert (found["server"]["options"], found["server"]["env"]) == (None, None)


def test_the_key_and_the_environment_stay_out(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-s3cret")
    monkeypatch.setenv("HF_TOKEN", "hf-s3cret")
    assert "s3cret" not in json.dumps(told(server, tmp_path))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """Those of a run of a server that tells all of itself."""
    with FakeServer() as server:
        server.told = REVISION | {"options": {"dtype": "float32"}}
        server.structure = {"id": "fake/model", "layers": 2}
        return told(server, tmp_path_factory.mktemp("known"), "--session-id", "s")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda now: now["model"].update(revision="2" * 40), ["model.revision"]),
        (lambda now: now["model"].update(structure={"layers": 3}), ["model.structure"]),
        (lambda now: now["versions"].update(vitrine="9.9"), ["versions.vitrine"]),
        (lambda now: now["config"].update(max_tokens=7), ["max_tokens"]),
        (lambda now: now["prompts"].update(instruction="Answer!"), ["prompts"]),
        (lambda now: now["prompts"]["few_shot"]["examples"].clear(), ["prompts"]),
        (lambda now: now["dataset"].update(sha256="0"), ["dataset.sha256"]),
        (lambda now: now["server"].update(options={"dtype": "bfloat16"}), ["server.options.dtype"]),
        # What says nothing of the answers, or is not known of one of both:
        (lambda now: now["model"].update(created=5), []),
        (lambda now: now["server"].update(options={"dtype": "float32", "threads": 2}), []),
        (
            lambda now: now["config"].update(max_outage=1.0, retries=0, rule="strict", base_url="http://b/v1"),
            [],
        ),
        (lambda now: now["config"].update(dataset="/moved/x.jsonl", few_shot_file="/moved/f.jsonl"), []),
        (lambda now: now["prompts"]["few_shot"].update(source="/moved/train.jsonl"), []),
    ],
)
def test_what_changes_answers_or_scores_is_named_and_nothing_else(
    known: Facts, change: Change, named: list[str]
) -> None:
    earlier, now = known, copy.deepcopy(known)
    change(now)
    assert differences(earlier, now) == named
    if named != ["max_tokens"]:  # which has to be there
        assert differences(now, earlier) == named


def test_a_shorter_time_limit_is_another_run_and_a_longer_one_is_not(server: FakeServer, tmp_path: Path) -> None:
    short, long = (told(server, tmp_path, "--session-id", "s", "--timeout", seconds) for seconds in ("100", "200"))
    assert differences(short, long) == []
    assert differences(long, short) == ["timeout"]


@pytest.mark.parametrize("part", ["revision", "structure"])
def test_what_a_server_told_once_it_has_to_tell_again(server: FakeServer, tmp_path: Path, part: str) -> None:
    server.told, server.structure = REVISION, {"layers": 2}
    earlier = told(server, tmp_path, "--session-id", "s")
    now = copy.deepcopy(earlier)
    now["model"][part] = None
    assert differences(earlier, now) == [f"model.{part}"]
    assert differences(now, earlier) == []  # it may tell more than it did


@pytest.mark.parametrize(
    "answer",
    [
        JSONResponse({"error": {"message": "no such key"}}, status_code=401),
        JSONResponse({"error": {"message": "it starts"}}, status_code=503),
        JSONResponse({"error": {"message": "too many requests"}}, status_code=429),
        PlainTextResponse("Path '/v1/models' not found.", status_code=404),
    ],
)
def test_a_server_that_cannot_say_which_models_it_has_is_not_taken_for_one_that_tells_nothing(
    server: FakeServer, tmp_path: Path, answer: Response
) -> None:
    server.closed = answer
    with pytest.raises(RequestFailed, match=f"/v1/models: .*HTTP {answer.status_code}: "):
        told(server, tmp_path)


@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_server_that_has_no_such_routes_tells_nothing_and_is_no_error(
    server: FakeServer, tmp_path: Path, status: int
) -> None:
    server.closed = PlainTextResponse("404 page not found", status_code=status)
    assert told(server, tmp_path)["model"] == {"id": "fake/model", "structure": None}


def test_a_model_that_tells_its_dtype_later_has_to_keep_to_it(server: FakeServer, tmp_path: Path) -> None:
    first = told(server, tmp_path, "--session-id", "s")
    second, third = copy.deepcopy(first), copy.deepcopy(first)
    second["server"]["options"], third["server"]["options"] = {"dtype": "float32"}, {"dtype": "bfloat16"}
    second["model"]["revision"] = "1" * 40
    assert differences(first, second) == []
    again = resumed(first, second)
    assert again["model"] == first["model"]  # what was answered then is of no known revision
    assert differences(again, third) == ["model.revision", "server.options.dtype"]


def test_a_run_that_goes_on_with_another_server_names_each(server: FakeServer, tmp_path: Path) -> None:
    server.told = REVISION | {"options": {"threads": 1}}
    first = told(server, tmp_path)
    again = resumed(first, told(server, tmp_path))
    assert "resumed" not in again
    server.told = REVISION | {"options": {"threads": 2}}
    second = resumed(again, told(server, tmp_path))
    third = resumed(second, told(server, tmp_path))
    assert third["server"]["options"] == {"threads": 1}
    assert [part["server"]["options"] for part in third["resumed"]] == [{"threads": 2}]
    server.told = REVISION | {"options": {"threads": 1}}
    assert len(resumed(third, told(server, tmp_path))["resumed"]) == 2


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    if not shutil.which("git"):
        pytest.skip("there is no git")
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "code.py").write_text("1")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    return root


def test_the_checkout_is_known_by_its_commit_and_whether_it_was_changed(repository: Path) -> None:
    head = subprocess.run(["git", "-C", str(repository), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert checkout(repository) == {"commit": head.stdout.strip(), "dirty": False}
    (repository / "results").mkdir()
    (repository / "results" / "new.txt").write_text("")  # no change of the code
    assert checkout(repository) == {"commit": head.stdout.strip(), "dirty": False}
    (repository / "code.py").write_text("2")
    assert checkout(repository) == {"commit": head.stdout.strip(), "dirty": True}


def test_outside_of_a_checkout_of_its_own_there_is_no_commit(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = repository / "venv" / "site-packages"
    installed.mkdir(parents=True)
    assert checkout(installed) is None  # that commit is somebody else's
    assert checkout(tmp_path) is None
    assert checkout(tmp_path / "absent") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkout(repository) is None  # there is no git
