"""Training gets every stored row once per epoch, with its token and run, for any layout of files."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from storing import store
from torch.utils.data import DataLoader

from deployments.activations.reader import training
from deployments.activations.reader.sources import segments
from deployments.activations.reader.training import ActivationRows
from deployments.errors import RequestError
from deployments.points.patterns import Patterns

POINT, HEADS, WEIGHTS = "layers.1.output", "layers.1.attention.heads", "layers.1.attention.weights"
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def seen(batches, runs) -> Counter:
    """Every row that came, with all that is said of it."""
    found = Counter()
    for batch in batches:
        assert {len(value) for value in (*batch.points.values(), *batch[1:])} == {len(batch.run)}
        fields = zip(*(field.tolist() for field in batch[1:]), strict=True)
        for i, (token, position, generated, run) in enumerate(fields):
            values = tuple((name, value.dtype, bits(value[i])) for name, value in batch.points.items())
            found[runs[run].run_id, position, token, generated, values] += 1
    return found


def written(made, points, tokens="all") -> Counter:
    found = Counter()
    for one in made:
        prompt = one.facts.prompt_tokens
        wanted = {
            "all": lambda i: True,
            "generated": lambda i, prompt=prompt: i >= prompt,
            "prompt_last": lambda i, prompt=prompt: i == prompt - 1,
        }
        for i in range(len(next(iter(one.points.values())))):
            if i in tokens["positions"] if isinstance(tokens, dict) else wanted[tokens](i):
                values = tuple((name, one.points[name].dtype, bits(one.points[name][i])) for name in points)
                found[one.facts.run_id, i, 100 + i, i >= prompt, values] += 1
    return found


@st.composite
def layouts(draw):
    """Runs of any lengths and parts, in files of any number; any bits, NaNs among them."""
    dtypes = draw(st.tuples(*[st.sampled_from(DTYPES)] * 2))
    shapes = draw(st.tuples(*[st.lists(st.integers(1, 5), min_size=1, max_size=2)] * 2))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def points(rows):
        values = {}
        for name, dtype, shape in zip((POINT, HEADS), dtypes, shapes, strict=True):
            size = (rows, *shape[:-1], shape[-1] * dtype.itemsize)
            values[name] = torch.randint(0, 256, size, generator=seed, dtype=torch.uint8).view(dtype)
        return values

    rows = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    runs = [(points(count), draw(st.integers(1, min(count, 3)))) for count in rows]
    names = draw(st.sampled_from([[POINT], [HEADS, POINT]]))
    return runs, names, draw(st.sampled_from([1, 2000, 1 << 30]))


@given(
    layouts(),
    st.sampled_from(["all", "generated", "prompt_last", {"positions": [1, 4, 0]}]),
    st.integers(1, 12),
    st.integers(1, 600),
    st.integers(1, 100),
    st.integers(1, 4),
    st.booleans(),
)
def test_every_row_comes_once_an_epoch_bit_for_bit(make, layout, tokens, size, window, piece, ranks, shuffle):
    runs, names, segment_bytes = layout
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "_PIECE", piece)
        made = [make(f"r{i}", points, parts=parts) for i, (points, parts) in enumerate(runs)]
        store(Path(folder), *made, segment_bytes=segment_bytes)
        expected = written(made, names, tokens)
        if not expected:
            with pytest.raises(ValueError, match="no run has rows"):
                ActivationRows(folder, names, batch_size=size, tokens=tokens)
            return
        options = {"batch_size": size, "tokens": tokens, "shuffle": shuffle, "window_bytes": window}
        shares = [ActivationRows(folder, names, rank=rank, world_size=ranks, **options) for rank in range(ranks)]
        for epoch in range(2):
            for share in shares:
                share.set_epoch(epoch)
            found = [list(share) for share in shares]
            assert seen([batch for share in found for batch in share], shares[0].runs) == expected
            for share in found:
                assert all(len(batch.run) == size for batch in share[:-1])
        whole = ActivationRows(folder, names, rank=ranks - 1, world_size=ranks, drop_last=True, **options)
        assert [len(batch.run) for batch in whole] == [size] * (whole.rows // ranks // size)


@pytest.fixture
def session(make, tmp_path):
    """Thirty runs of 40 tokens in several files: the store's root."""
    made = [make(f"r{i:02}", {POINT: torch.full((40, 4), i).bfloat16()}, tags={"label": str(i % 2)}) for i in range(30)]
    store(tmp_path, *made, segment_bytes=8000)
    assert len(segments(tmp_path)) > 3
    return tmp_path


def order(rows) -> list[tuple[int, int]]:
    return [pair for batch in rows for pair in zip(batch.run.tolist(), batch.position.tolist(), strict=True)]


def test_the_order_follows_from_the_seed_and_the_epoch(session):
    rows, again = (ActivationRows(session, [POINT], batch_size=16, seed=3) for _ in range(2))
    first = order(rows)
    assert first == order(rows) == order(again)
    assert first != order(ActivationRows(session, [POINT], batch_size=16, seed=4))
    rows.set_epoch(1)
    assert first != order(rows)
    assert sorted(first) == sorted(order(rows))


def test_in_order_rows_come_as_they_were_written(session):
    rows = ActivationRows(session, [POINT], batch_size=64, shuffle=False)
    assert [(rows.runs[run].run_id, position) for run, position in order(rows)] == [
        (f"r{run:02}", position) for run in range(30) for position in range(40)
    ]


def test_rows_of_a_run_are_spread_over_the_batches(session):
    # A window of everything is a permutation of everything.
    for batch in ActivationRows(session, [POINT], batch_size=120):
        assert len(batch.run.unique()) > 20
    # Windows of 200 rows, of pieces of 8: each has rows of many of the 30 runs.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "_PIECE", 8 * 16)
        for batch in ActivationRows(session, [POINT], batch_size=120, window_bytes=200 * 16):
            assert len(batch.run.unique()) > 10


# A worker that is spawned takes seconds to import what it needs.
@pytest.mark.parametrize(("context", "workers", "shuffle"), [("fork", 2, True), ("fork", 2, False), ("spawn", 1, True)])
def test_workers_share_the_rows_and_see_the_epoch(session, context, workers, shuffle):
    rows = ActivationRows(session, [POINT], batch_size=32, shuffle=shuffle)
    expected = sorted((run, position) for run in range(30) for position in range(40))
    started = {"persistent_workers": True, "multiprocessing_context": context, "prefetch_factor": 1}
    loader = DataLoader(rows, batch_size=None, num_workers=workers, **started)
    orders = []
    for epoch in range(2):
        rows.set_epoch(epoch)
        orders.append(order(loader))
        assert sorted(orders[-1]) == expected
    assert (orders[0] != orders[1]) == shuffle


def test_only_what_is_asked_for_comes(session):
    rows = ActivationRows(session, [POINT], batch_size=8, runs=["r03", "r17"], tokens="generated")
    assert [run.run_id for run in rows.runs] == ["r03", "r17"]
    assert sorted(order(rows)) == [(0, 39), (1, 39)]
    assert all(batch.generated.all() for batch in rows)
    assert rows.rows == 2
    labels = torch.tensor([int(run.tags["label"]) for run in rows.runs])
    for batch in rows:
        assert torch.equal(labels[batch.run], batch.points[POINT][:, 0].int() % 2)


def test_runs_without_a_point_and_open_runs_are_left_out(make, open_writer, tmp_path):
    writer, half = open_writer(), make("half", {POINT: torch.ones(4, 3)}, parts=2)
    for one in (make("a", {POINT: torch.ones(2, 3)}), make("b", {HEADS: torch.ones(2, 3)})):
        writer.submit(one.facts, one.batches).result()
    writer.append(half.facts.session, "half", 0, half.batches[:1]).result()
    assert [run.run_id for run in ActivationRows(tmp_path, [POINT], batch_size=2).runs] == ["a"]
    writer.submit(half.facts, half.batches[1:], 1).result()
    assert {run.run_id for run in ActivationRows(tmp_path, [POINT], batch_size=2).runs} == {"a", "half"}


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"points": []}, ValueError, "points: name at least one"),
        ({"points": POINT}, ValueError, "points: name at least one, as a list"),
        ({"points": ["embed.output"]}, RequestError, "no such run recorded 'embed.output'; there is layers"),
        ({"points": [WEIGHTS]}, ValueError, "attention pattern, whose rows grow"),
        ({"points": [HEADS, POINT], "runs": ["a"]}, ValueError, "'a' did not record layers.1.attention.heads"),
        ({"points": [HEADS, POINT]}, ValueError, "no run has rows of"),
        ({"runs": ["a", "b"]}, ValueError, "'b' did not record layers.1.output"),
        ({"seed": -1}, ValueError, "seed: -1"),
        ({"runs": ["zzz"]}, RequestError, "no run 'zzz'; there is a, b, c"),
        ({"runs": "a"}, ValueError, "runs: name them as a list"),
        ({"session": "never"}, FileNotFoundError, "no session 'never'"),
        ({"tokens": "first"}, ValueError, "tokens: 'first' is none of all, prompt, generated"),
        ({"batch_size": 0}, ValueError, "batch_size: 0"),
        ({"window_bytes": 0}, ValueError, "window_bytes: 0"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank: 2 is not one of 2"),
        ({}, ValueError, "layers.1.output is .* in some runs and .* in 'c'"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(make, tmp_path, given, error, match):
    patterns = Patterns(torch.randn(6), 1, range(3))
    made = [
        make("a", {POINT: torch.ones(3, 4), WEIGHTS: patterns}),
        make("b", {HEADS: torch.ones(3, 4)}),
        make("c", {POINT: torch.ones(3, 5)}, session_id="wider"),
    ]
    store(tmp_path, *made)
    with pytest.raises(error, match=match):
        ActivationRows(tmp_path, **{"points": [POINT], "batch_size": 2, **given})


def test_a_file_that_was_cut_since_is_named(session):
    rows = ActivationRows(session, [POINT], batch_size=2)
    path = segments(session)[-1]
    os.truncate(path, 100)
    with pytest.raises(ValueError, match=f"{path.name} is shorter than when it was indexed"):
        next(iter(rows))


def test_memory_is_two_windows_and_a_batch_and_files_are_not_kept_open(make, tmp_path):
    large = [make(f"r{i}", {POINT: torch.randn(1024, 4096)}, parts=8) for i in range(8)]
    store(tmp_path / "large", *large)  # 128 MiB
    many = [make(f"r{i}", {POINT: torch.full((4, 4), i).bfloat16()}) for i in range(90)]
    assert len(store(tmp_path / "many", *many, segment_bytes=1)) == 90
    check = f"""
import resource
from deployments.activations.reader.training import ActivationRows
def own():
    return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('RssAnon')) << 10
for shuffle in (True, False):
    rows = ActivationRows("{tmp_path}/large", [{POINT!r}], batch_size=64, shuffle=shuffle, window_bytes=1 << 24)
    next(iter(rows))
    before, most = own(), 0
    for batch in rows:
        most = max(most, own())
    assert most - before < 48 << 20, (most - before, shuffle)  # two windows and a batch
resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
rows = ActivationRows({str(tmp_path / "many")!r}, [{POINT!r}], batch_size=64)
print(sorted(run for batch in rows for run in batch.run.tolist()) == [run for run in range(90) for _ in range(4)])
"""
    root = str(Path(training.__file__).parents[3])
    said = subprocess.run([sys.executable, "-c", check], cwd=root, capture_output=True, text=True)
    assert (said.stdout, said.returncode) == ("True\n", 0), said.stderr
