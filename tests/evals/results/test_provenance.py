import copy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_openai import FakeServer
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from evals.gsm8k.options import parse_args
from evals.results.provenance import Facts, checkout, differences, facts
from evals.server.answers import RequestFailed
from evals.task.prompts import Example, Prompts

Change = Callable[[Facts], object]
REVISION = {"revision": "1" * 40}


def told(server: FakeServer, tmp_path: Path) -> Facts:
    dataset = tmp_path / "x.jsonl"
    dataset.write_text("{}")
    config = parse_args(["--base-url", server.base_url, "--model", "fake/model", "--dataset", str(dataset)])
    few_shot = [Example("e", "What is 1 + 1?", "#### 2")]
    return facts(config, Prompts({"control": ""}, few_shot), dataset, 1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda now: now["model"].update(revision="2" * 40), ["model.revision"]),
        (lambda now: now["versions"].update(vitrine="9.9"), ["versions.vitrine"]),
        (lambda now: now["config"].update(max_tokens=7), ["max_tokens"]),
        (lambda now: now["prompts"].update(instruction="Answer!"), ["prompts"]),
        (lambda now: now["prompts"]["few_shot"].clear(), ["prompts"]),
        (lambda now: now["dataset"].update(sha256="0"), ["dataset.sha256"]),
        # What says nothing of the answers:
        (lambda now: now["model"].update(created=5), []),
        (lambda now: now["config"].update(max_outage=1.0, rule="strict", base_url="http://b/v1"), []),
        (lambda now: now["config"].update(dataset="/moved/x.jsonl", few_shot="/moved/f.jsonl"), []),
    ],
)
def test_what_changes_answers_or_scores_is_named_and_nothing_else(
    server: FakeServer, tmp_path: Path, change: Change, named: list[str]
) -> None:
    server.told = REVISION
    earlier = told(server, tmp_path)
    now = copy.deepcopy(earlier)
    change(now)
    assert differences(earlier, now) == named


@pytest.mark.parametrize(
    "answer",
    [
        JSONResponse({"error": {"message": "no such key"}}, status_code=401),
        JSONResponse({"error": {"message": "it starts"}}, status_code=503),
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
def test_a_server_that_has_no_such_route_tells_nothing_and_is_no_error(
    server: FakeServer, tmp_path: Path, status: int
) -> None:
    server.closed = PlainTextResponse("404 page not found", status_code=status)
    found = told(server, tmp_path)
    assert (found["model"], found["server"]) == ({"id": "fake/model"}, {"options": None, "versions": None})


@pytest.mark.skipif(not shutil.which("git"), reason="git knows the commit")
def test_the_checkout_is_known_by_its_commit_and_whether_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "code.py").write_text("1")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    (root / "installed").mkdir()
    (root / "installed" / "new.txt").write_text("")  # no change of the code
    assert checkout(root) == {"commit": head, "dirty": False}
    (root / "code.py").write_text("2")
    assert checkout(root) == {"commit": head, "dirty": True}
    assert checkout(root / "installed") is None  # that commit is somebody else's
    assert checkout(tmp_path / "absent") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkout(root) is None  # there is no git
