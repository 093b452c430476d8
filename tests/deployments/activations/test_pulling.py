"""A pulled session is the server's bit for bit, and whole; what else a server sends is not kept."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from storing import store

from deployments.activations import read_run
from deployments.activations.__main__ import main
from deployments.activations.filters import Filter
from deployments.activations.index.index import Index
from deployments.activations.reader import pulling
from deployments.activations.reader.pulling import PullError, pull
from deployments.activations.reader.sources import segments
from deployments.activations.segments.verify import verify
from deployments.points.patterns import Patterns
from vitrine.connection import transport
from vitrine.runs import fetching
from vitrine.runs.files import head_length

POINT, WEIGHTS, OTHER = "layers.1.output", "layers.1.attention.weights", "norm.output"


@pytest.fixture
def made(make):
    """Five runs of the same points in two parts each, and one of another point."""
    points = lambda: {POINT: torch.randn(40, 50).bfloat16(), WEIGHTS: Patterns(torch.randn(1640), 2, range(40))}  # noqa: E731
    of = {"owner": "ann"}
    return [
        *(make(f"r{i}", points(), parts=2, created=float(i), **of) for i in range(5)),
        make("other", {OTHER: torch.ones(2, 3)}, created=9.0, **of),
    ]


@pytest.fixture
def root(made, tmp_path):
    assert len(store(tmp_path / "store", *made)) == 2
    return tmp_path / "store"


@pytest.fixture
def server(root, monkeypatch):
    """An HTTP server of a store; `asked` are the paths of all requests, `change` gives other bytes of a file, and `cut`
    bytes are missing of each of its answers.
    """
    monkeypatch.setattr(transport, "PAGE_BYTES", 3000)
    monkeypatch.setattr(fetching, "HEAD_BYTES", 500)
    monkeypatch.setattr(pulling, "MAX_OUTAGE_S", 0.0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
            runs = query.get("run", "").split(",") if "run" in query else None
            self.server.asked.append(self.path)
            self.server.keys.add(self.headers["Authorization"])
            if found := re.fullmatch(r"/v1/activations/session/(\w+)/files/(.+)", url.path):
                self._file(root / query["owner"] / found[1] / found[2])
                return
            assert url.path == "/v1/activations/runs"
            filter = Filter(query.get("session"), runs=runs and tuple(runs))
            listed = Index.scanned(root).runs(filter, 5, query.get("after"))
            listed = [run | self.server.lie for run in listed]
            body = json.dumps({"data": listed[:4], "has_more": len(listed) > 4}).encode()
            self._answer(200, body, len(body))

        def _file(self, path):
            data = path.read_bytes()
            first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
            body = self.server.change(data)[first : last + 1]
            self._answer(206, body[: len(body) - self.server.cut], len(body), f"bytes {first}-{last}/{len(data)}")

        def _answer(self, status, body, length, span=""):
            self.send_response(status)
            self.send_header("Content-Range", span)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        serving.asked, serving.keys, serving.cut, serving.lie = [], set(), 0, {}
        serving.change = lambda data: data
        serving.url = f"http://127.0.0.1:{serving.server_port}"
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        yield serving
        serving.shutdown()


def same(left, right) -> bool:
    left, right = (rows.values if isinstance(rows, Patterns) else rows for rows in (left, right))
    return left.dtype == right.dtype and torch.equal(left.contiguous().view(torch.uint8), right.view(torch.uint8))


def assert_has(folder, *made):
    for one in made:
        run = read_run(folder, one.facts.run_id, verify=True)
        assert run.facts == one.facts
        assert all(same(run[name], value) for name, value in one.points.items())


def test_a_pulled_session_has_the_servers_runs_in_sealed_files(server, root, made, tmp_path):
    folder = pull(f"{server.url}/v1/", "session", tmp_path / "to", api_key="sk-key", progress=False)
    assert folder == tmp_path / "to" / "session"
    assert {path.name for path in folder.iterdir()} == {path.name for path in (root / "ann" / "session").iterdir()}
    assert all(verify(path).state == "whole" for path in folder.iterdir())
    assert_has(folder, *made)
    assert server.keys == {"Bearer sk-key"}
    assert all("owner=ann" in asked for asked in server.asked if "/files/" in asked)
    with pytest.raises(FileExistsError, match="is there already"):
        pull(server.url, "session", tmp_path / "to")


def test_some_runs_are_cut_out_of_their_files(server, made, tmp_path):
    folder = pull(server.url, "session", tmp_path, ["r0", "r3"], owner="ann", progress=False)
    [path] = folder.iterdir()
    assert (verify(path).state, verify(path).runs) == ("whole", 2)
    assert_has(folder, made[0], made[3])
    with pytest.raises(PullError, match="there is no run 'never' at"):
        pull(server.url, "session", tmp_path / "to", ["r0", "never"], progress=False)
    with pytest.raises(PullError, match="there is no session 'session' at"):
        pull(server.url, "session", tmp_path / "to", ["r0"], owner="bob", progress=False)


def test_sessions_of_one_name_of_several_owners_are_told_apart(server, root, make, made, tmp_path):
    store(root, other := make("r9", {POINT: torch.ones(2, 3)}, owner="bob"))
    with pytest.raises(PullError, match="several owners have a session 'session': name one"):
        pull(server.url, "session", tmp_path, progress=False)
    assert_has(pull(server.url, "session", tmp_path, owner="bob", progress=False), other)


def test_of_a_file_that_is_still_written_the_whole_runs_come(server, root, made, tmp_path):
    path = max((root / "ann" / "session").glob("*.arrow"), key=lambda path: path.stat().st_size)
    entry = Index.scanned(root).find("r4")
    path.write_bytes(path.read_bytes()[: entry.offset + entry.bytes - 100])  # within the last run
    folder = pull(server.url, "session", tmp_path, progress=False)
    assert all(verify(path).state == "whole" for path in folder.iterdir())
    assert_has(folder, *made[:4], made[5])


def test_a_run_is_loaded_from_a_server_by_its_id(server, made, monkeypatch):
    monkeypatch.setenv("VITRINE_API_KEY", "sk-env")
    assert same(read_run("r2", root=server.url)[POINT], made[2].points[POINT])
    assert server.keys == {"Bearer sk-env"}
    count = len(server.asked)
    assert read_run("r2", root=server.url).facts == made[2].facts
    assert len(server.asked) == count
    with pytest.raises(ValueError, match="the run 'r9' cannot be fetched from http://.*there is no"):
        read_run("r9", root=server.url)
    server.cut = 1
    with pytest.raises(ValueError, match="the run 'r4' cannot be fetched from http://.*does not answer"):
        read_run("r4", root=server.url)


def test_the_command_pulls_into_a_store_that_it_lists(server, made, tmp_path, capsys):
    assert main(["pull", server.url, "session", "--dir", str(tmp_path / "laptop"), "--run", "r1"]) == 0
    assert str(tmp_path / "laptop" / "_" / "session") in capsys.readouterr().out
    assert len(segments(tmp_path / "laptop")) == 1
    assert main(["ls", "session", "--dir", str(tmp_path / "laptop")]) == 0
    assert "\nr1 " in capsys.readouterr().out


def test_of_an_answer_that_is_cut_off_nothing_is_kept(server, tmp_path):
    server.cut = 1
    with pytest.raises(PullError, match="nothing is kept"):
        pull(server.url, "session", tmp_path / "to", progress=False)
    assert list((tmp_path / "to").iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:9000] + bytes(16) + data[9016:],
        lambda data: b"\xff" * len(data),
        lambda data: data[:8] + b"\xff\xff\xff\xff\x40\0\0\0" + b"\xee" * len(data),
        lambda data: data[:1000],
    ],
)
def test_what_is_not_as_it_was_written_is_not_kept(server, tmp_path, change):
    server.change = change
    with pytest.raises((PullError, ValueError)):
        pull(server.url, "session", tmp_path / "to", progress=False)
    assert list((tmp_path / "to").iterdir()) == []


@pytest.mark.parametrize("name", ["../../evil.arrow", "/etc/x.arrow", "", 7, ".hidden.arrow"])
def test_servers_names_of_files_lead_nowhere_else(server, tmp_path, name):
    server.lie = {"file": name}
    with pytest.raises(PullError, match="is no name of a file"):
        pull(server.url, "session", tmp_path / "to", progress=False)
    assert list((tmp_path / "to").iterdir()) == []


def test_errors_say_why(server, tmp_path):
    with pytest.raises(PullError, match="there is no session 'never'"):
        pull(server.url, "never", tmp_path)
    with pytest.raises(ValueError, match="session_id"):
        pull(server.url, "../x", tmp_path)
    with pytest.raises(ValueError, match="does not begin with http"):
        pull("example.org", "x", tmp_path)
    with pytest.raises(ValueError, match="printable ASCII"):
        pull(server.url, "x", tmp_path, api_key="\n")


# ---- cutting a run out of a file by its bytes


def test_a_head_that_is_cut_short_is_none_and_other_files_are_refused(root):
    data = segments(root)[0].read_bytes()
    length = head_length(data)
    found = {head_length(data[:end]) for end in range(length + 200)}
    assert found == {None, length}
    with pytest.raises(ValueError, match="Arrow"):
        head_length(b"PK\3\4")
