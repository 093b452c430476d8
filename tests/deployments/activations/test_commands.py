"""`python -m deployments.activations`: its output, and one clear line for each error."""

from __future__ import annotations

import http.server
import io
import re
import threading
from typing import get_args

import pyarrow as pa
import pytest
import torch

from deployments.activations import load, runs
from deployments.activations.__main__ import FORMATS, main, size
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.export.arrow_streams import as_arrow
from deployments.activations.export.exports import Format
from deployments.activations.reader.selection import Wanted
from deployments.activations.reader.sources import segments
from deployments.activations.segments.batches import batches_of
from deployments.activations.segments.segments import is_sealed, whole_runs
from deployments.activations.segments.verify import verify
from deployments.activations.writer.writer import Writer
from deployments.points.patterns import Patterns

POINT, WEIGHTS, OTHER = "layers.1.output", "layers.1.attention.weights", "norm.output"


@pytest.fixture
def made(make):
    """Two runs of the same points in two parts each, and one of another point."""
    points = lambda: {POINT: torch.randn(4, 5).bfloat16(), WEIGHTS: Patterns(torch.randn(20), 2, range(4))}  # noqa: E731
    facts = {"created": 1763700000.0, "tags": {"told": "a\tb\x1b[2J"}, "finish_reason": "stop"}
    return [
        make("r1", points(), parts=2, **facts),
        make("r2", points(), parts=2),
        make("r3", {OTHER: torch.ones(2, 3)}),
    ]


@pytest.fixture
def store(made, tmp_path):
    """A store of one session of those, whose files are sealed."""
    root = tmp_path / "store"
    root.mkdir()
    writer = Writer(root, Catalogue())
    for one in made:
        writer.submit(one.facts, one.batches).result()
    writer.close()
    return root


@pytest.fixture
def cli(store, capsys):
    """`cli("ls")`: the command's status, and what it printed and complained of."""

    def run(*args, dir=store) -> tuple[int, str, str]:
        status = main([args[0], "--dir", str(dir), *map(str, args[1:])])
        return status, *capsys.readouterr()

    return run


def test_sessions_are_listed_with_what_they_take(cli):
    status, out, _ = cli("ls")
    heads, row = out.splitlines()
    assert status == 0
    assert heads.split() == ["session", "runs", "tokens", "size", "updated", "models"]
    assert row.split()[:3] == ["session", "3", "10"]
    assert re.search(r"\d+\.\d KiB  2025-11-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d  model$", row)


def test_a_sessions_runs_are_listed_with_their_points(cli):
    status, out, _ = cli("ls", "session")
    heads, *rows = out.splitlines()
    assert status == 0
    assert heads.split() == ["run", "prompt", "tokens", "finish", "model", "sample", "created", "tags", "points"]
    assert [row.split()[0] for row in rows] == ["r2", "r3", "r1"]
    line = rf"^r1 +3 +4 +stop +model +- .*told=a\\tb\\x1b\[2J +{POINT}, {WEIGHTS}$"
    assert re.search(line, rows[2])  # a terminal obeys none


def test_a_look_beside_a_running_server_sees_its_runs_and_writes_nothing_of_its(cli, store, make, made):
    writer = Writer(store, catalogue := Catalogue.rebuild(store))
    late = make("late", {OTHER: torch.ones(2, 3)}, session_id="late")
    writer.submit(late.facts, late.batches).result()
    before = {
        path.name: path.read_bytes() for path in store.glob(".catalogue.sqlite3*") if path.suffix != ".sqlite3-shm"
    }
    assert [line.split()[0] for line in cli("ls")[1].splitlines()] == ["session", "late", "session"]
    after = {
        path.name: path.read_bytes() for path in store.glob(".catalogue.sqlite3*") if path.suffix != ".sqlite3-shm"
    }
    assert before == after
    assert before
    again = make("again", {OTHER: torch.ones(2, 3)}, session_id="late")
    writer.submit(again.facts, again.batches).result()
    assert catalogue.holds("late", "again")
    writer.close()


@pytest.mark.parametrize(("count", "said"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")])
def test_sizes_are_said_in_binary_units(count, said):
    assert size(count) == said


def test_the_command_exports_to_every_format():
    assert get_args(Format) == FORMATS


def test_an_export_says_what_it_wrote_and_refuses_to_overwrite(cli, tmp_path):
    assert cli("export", tmp_path / "to", "--format", "npz", "--run", "r1", "--run", "r3")[0] == 0
    assert len(list((tmp_path / "to").iterdir())) == 2
    status, out, complaint = cli("export", tmp_path / "to", "--format", "npz")
    assert (status, out) == (1, "")
    assert re.fullmatch(r"deployments\.activations: \S+activations_session_r1\.npz is there already.*\n", complaint)


@pytest.mark.parametrize(
    "args",
    [
        ("ls", "never"),
        ("ls", "../store"),
        ("export", "to", "--format", "pt", "--session", "never"),
        ("export", "to", "--format", "pt", "--points", "nothing"),
        ("verify", "never"),
        ("pull", "example.org", "session"),
        ("pull", "http://127.0.0.1:9", "other"),
        ("pull", "http://127.0.0.1:9", "session"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_1(cli, args):
    status, out, complaint = cli(*args)
    assert (status, out) == (1, "")
    assert re.fullmatch(r"deployments\.activations: [^\n]+\n", complaint)


def test_a_store_that_is_not_there_is_named(cli, tmp_path):
    for command in (("ls",), ("ls", "s"), ("verify",), ("export", "x", "--format", "pt")):
        status, _, complaint = cli(*command, dir=tmp_path / "none")
        assert status == 1
        assert str(tmp_path / "none") in complaint


def test_whole_files_are_said_to_be_whole(cli):
    status, out, _ = cli("verify")
    assert status == 0
    assert [line.split()[3:] for line in out.splitlines()[1:]] == [["whole", "2", "8"], ["whole", "1", "2"]]


def test_of_a_file_cut_anywhere_verify_says_what_load_can_still_read(store, made, tmp_path):
    path = next(file.local for file in segments(store) if len(runs(file)) == 2)
    data, seen = path.read_bytes(), set()
    ends = [item.end for item in batches_of(path)]
    whole = [ends[i] for i in (1, 3)]
    torn = tmp_path / "torn.arrow"
    for length in (*range(0, len(data), 41), *ends, len(data)):
        torn.write_bytes(data[:length])
        found = verify(torn)
        assert found.runs == len(runs(torn)) == sum(end <= length for end in whole)
        assert found.rows == 4 * found.runs
        assert found.ok == (length == len(data) or length in whole)
        assert found.ok or found.reason
        for run in runs(torn):
            assert len(load(torn, run.run_id)[POINT]) == 4
        seen.add((found.state, found.runs, tuple(found.unfinished.items())))
    assert {("damaged", 0, ()), ("cut short", 0, (("r1", 2),)), ("cut short", 1, ())} < seen
    assert {("cut short", 1, (("r2", 2),)), ("open", 1, ()), ("open", 2, ()), ("whole", 2, ())} < seen


def test_damage_within_a_sealed_file_is_found_and_named(cli, store):
    path = next(file.local for file in segments(store) if len(runs(file)) == 2)
    data = bytearray(path.read_bytes())
    start = next(whole_runs(path)).bytes  # where the second run begins
    data[start : start + 64] = b"\xff" * 64
    path.write_bytes(data)
    status, out, complaint = cli("verify", "session")
    assert status == 1
    assert "damaged" in out
    assert "batch 2 of 4 and all after it cannot be read" in out
    assert "1 of 2 files are not whole" in complaint


@pytest.fixture
def server(store):
    """An HTTP server that gives the store's session; `server.cut` bytes are missing, `server.seen` is the request."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.seen = (self.path, self.headers["Authorization"])
            body = self.server.body or b"".join(as_arrow(segments(store), Wanted()).read())
            first = int(re.fullmatch(r"bytes=(\d+)-\d+", self.headers["Range"])[1])
            page = body[first : first + self.server.page]
            tags = [self.headers["If-Match"]] if first else []
            self.send_response(206 if set(tags) <= {self.server.tag} else 412)
            self.send_header("ETag", self.server.tag)
            self.send_header("Content-Range", f"bytes {first}-{first + len(page) - 1}/{len(body)}")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page[: len(page) - self.server.cut])
            self.server.tag = next(self.server.tags, self.server.tag)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        serving.cut, serving.body, serving.page = 0, b"", 1000
        serving.tag, serving.tags = '"v1"', iter([])
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        yield serving
        serving.shutdown()


def test_a_pulled_session_is_the_servers_bit_for_bit(cli, store, server, made, tmp_path, monkeypatch):
    monkeypatch.setenv("VITRINE_API_KEY", "sk-of-the-environment")
    url = f"http://127.0.0.1:{server.server_port}/v1/"
    status, out, _ = cli("pull", url, "session", "--run", "r1", "--points", POINT, dir=tmp_path / "laptop")
    assert status == 0
    assert str(tmp_path / "laptop" / "session") in out
    path, key = server.seen
    assert path == f"/v1/activations/session/session/data?run=r1&points={POINT}&format=arrow"
    assert key == "Bearer sk-of-the-environment"
    files = segments(tmp_path / "laptop")
    assert len(files) == 2
    assert all(is_sealed(file) and verify(file).ok for file in files)
    for one in made:
        run = load(tmp_path / "laptop" / "session", one.facts.run_id)
        assert run.facts == one.facts
        for name, value in one.points.items():
            left, right = (rows.values if isinstance(rows, Patterns) else rows for rows in (run[name], value))
            assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    assert cli("ls", dir=tmp_path / "laptop")[1].splitlines()[1].split()[:3] == ["session", "3", "10"]
    status, _, complaint = cli("pull", url, "session", dir=tmp_path / "laptop")
    assert status == 1
    assert "is there already" in complaint


@pytest.mark.parametrize("cut", [1, 8, 500, 1000])
def test_of_an_answer_that_is_cut_off_nothing_is_kept(cli, server, tmp_path, cut):
    server.cut = cut
    status, _, complaint = cli("pull", f"http://127.0.0.1:{server.server_port}", "session", dir=tmp_path / "laptop")
    assert status == 1
    assert "cut off" in complaint
    assert list((tmp_path / "laptop").iterdir()) == []


def test_a_session_that_changes_between_two_pages_is_not_pulled(cli, server, tmp_path):
    server.tags = iter(['"v1"', '"v1"', '"v2"'])
    status, _, complaint = cli("pull", f"http://127.0.0.1:{server.server_port}", "session", dir=tmp_path / "laptop")
    assert status == 1
    assert "changed while it was pulled, nothing of it is kept: pull it again" in complaint
    assert list((tmp_path / "laptop").iterdir()) == []


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"\xff\xff\xff\xff\x40\x00\x00\x00" + b"\xee" * 64])
def test_an_answer_that_is_no_arrow_stream_is_said_to_be_none(cli, server, tmp_path, body):
    server.body = body
    status, _, complaint = cli("pull", f"http://127.0.0.1:{server.server_port}", "session", dir=tmp_path / "laptop")
    assert status == 1
    assert "did not send an Arrow stream" in complaint
    assert list((tmp_path / "laptop").iterdir()) == []


def test_streams_of_several_tables_are_read_one_behind_the_other(store):
    file = io.BytesIO(b"".join(as_arrow(segments(store), Wanted()).read()))
    tables = [pa.ipc.open_stream(file).read_all() for _ in range(2)]
    assert [table["run_id"].unique().to_pylist() for table in tables] == [["r1", "r2"], ["r3"]]
    assert not file.read()
