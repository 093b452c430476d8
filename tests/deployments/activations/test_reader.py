from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deployments.activations
from deployments.activations import load, runs
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.facts import RunFacts, SegmentFacts
from deployments.activations.segments.columns import to_batch
from deployments.activations.segments.segments import is_sealed
from deployments.activations.writer.writer import Writer
from deployments.points.patterns import Patterns, keys

REPOSITORY = Path(deployments.activations.__file__).parents[2]
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


@st.composite
def tensors(draw):
    """Points of one run: any bits, NaN among them, as [rows, hidden], [rows, heads, head_dim] or patterns."""
    rows = draw(st.integers(1, 6))
    shapes = st.lists(st.integers(1, 5), min_size=1, max_size=2)
    points = {}
    for name in draw(st.sets(st.sampled_from(["layers.0.output", "lm_head.output", "norm.input"]), min_size=1)):
        dtype, shape = draw(st.sampled_from(list(BITS))), (rows, *draw(shapes))
        seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        info = torch.iinfo(BITS[dtype])
        points[name] = torch.randint(info.min, info.max, shape, generator=seed, dtype=BITS[dtype]).view(dtype)
    if draw(st.booleans()):
        dtype, heads = draw(st.sampled_from(list(BITS))), draw(st.integers(1, 3))
        count, seed = heads * rows * (rows + 1) // 2, torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        info = torch.iinfo(BITS[dtype])
        bits = torch.randint(info.min, info.max, (count,), generator=seed, dtype=BITS[dtype])
        points["layers.1.attention.weights"] = Patterns(bits.view(dtype), heads, range(rows))
    return points, draw(st.integers(1, rows))


def same_bits(left, right):
    if isinstance(left, Patterns):
        assert (left.heads, left.positions) == (right.heads, right.positions)
        left, right = left.values, right.values
    return left.dtype == right.dtype and torch.equal(left.view(BITS[left.dtype]), right.view(BITS[right.dtype]))


@given(tensors(), st.booleans())
def test_what_is_read_is_what_was_written_bit_by_bit(make, drawn, sealed):
    points, parts = drawn
    made = make("r", points, parts=parts, sample_id="s", tags={"k": "\u00e9"}, sampling={"top_p": 0.5})
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder), Catalogue())
        stored = writer.submit(made.facts, made.batches).result()
        if sealed:
            writer.close()
        for name, point in stored.points.items():
            run = load(point.uri, "r")
            assert same_bits(run[name], points[name])
            assert (point.shape, point.dtype) == (tuple(run[name].shape), str(run[name].dtype)[6:])
            assert len(run[name]) == point.shape[0]
            assert is_sealed(Path(point.uri.removeprefix("file://"))) == sealed
        rows = len(run.positions)
        assert run.facts == made.facts
        assert (run.segment.architecture, list(run)) == ("Qwen3ForCausalLM", list(points))
        assert run.positions.tolist() == list(range(rows))
        assert run.token_ids.tolist() == list(range(100, 100 + rows))
        assert run.phases == ["prompt"] * (rows - 1) + ["generated"]
        writer.close()


def some_patterns(rows, heads=2, first=0):
    positions = range(first, first + rows)
    return Patterns(torch.randn(heads * keys(positions)), heads, positions)


@pytest.fixture
def segment(make, open_writer):
    """An unsealed segment of three runs of two batches each, and what was written."""
    writer = open_writer()
    points = lambda: {"layers.0.output": torch.randn(3, 4), "layers.0.attention.weights": some_patterns(3)}  # noqa: E731
    made = [make(f"r{number}", points(), parts=2) for number in range(3)]
    stored = [writer.submit(item.facts, item.batches).result() for item in made]
    return Path(stored[0].points["layers.0.output"].uri.removeprefix("file://")), made


def test_a_run_cut_off_by_a_crash_is_not_listed(segment, tmp_path):
    path, made = segment
    whole, torn = path.read_bytes(), tmp_path / "torn.arrow"
    seen = set()
    for length in (*range(0, len(whole), 17), len(whole)):  # odd, so that no alignment is left out
        torn.write_bytes(whole[:length])
        listed = runs(torn)
        assert listed == [item.facts for item in made[: len(listed)]]
        if listed:
            last = load(torn, listed[-1].run_id)
            assert torch.equal(last["layers.0.output"], made[len(listed) - 1].points["layers.0.output"])
            assert same_bits(*(of["layers.0.attention.weights"] for of in (last, made[len(listed) - 1].points)))
        seen.add(len(listed))
    assert seen == {0, 1, 2, 3}


def test_each_run_of_a_shared_file_is_found_by_its_id(segment):
    path, made = segment
    for source in (path, path.parent, path.as_uri(), str(path)):
        for item in made:
            assert torch.equal(load(source, item.facts.run_id)["layers.0.output"], item.points["layers.0.output"])


def test_a_plain_arrow_stream_reader_understands_an_open_segment(segment):
    path, made = segment
    with path.open("rb") as file:
        file.seek(8)
        table = pa.ipc.open_stream(file).read_all()
    assert table["run_id"].unique().to_pylist() == [item.facts.run_id for item in made]


def test_patterns_are_a_sequence_of_rows_that_grow_and_views_of_one_tensor(make, open_writer, tmp_path):
    patterns = some_patterns(300, heads=3)
    made = make("r", {"layers.1.attention.weights": patterns})
    stored = open_writer().submit(made.facts, made.batches).result()
    assert stored.points["layers.1.attention.weights"].shape == (300, 3, None)
    read = load(tmp_path / "session")["layers.1.attention.weights"]
    assert [row.shape for row in read] == [(3, k + 1) for k in range(300)]
    assert torch.equal(read[7], read[-293])
    assert torch.equal(read[7], patterns.values[3 * 28 : 3 * 36].view(3, 8))
    assert {row.untyped_storage().data_ptr() for row in read} == {read.values.untyped_storage().data_ptr()}
    assert read.padded().shape == (300, 3, 300)
    assert torch.equal(read.padded()[5, :, :6], read[5])
    assert not read.padded()[5, :, 6:].any()


def test_patterns_of_the_last_tokens_know_their_positions(open_writer, tmp_path):
    patterns, segment = some_patterns(4, first=9), SegmentFacts("session", "model", None, "x", {}, {})
    given = {"run_id": "r", "sample_id": None, "prompt_tokens": 10}
    batches = [
        to_batch(segment, positions=part.positions, token_ids=part.positions, points={"p": part}, **given)
        for part in (patterns[:1], patterns[1:3], patterns[3:])
    ]
    open_writer().submit(RunFacts("r", "session", "model", 0.0, 10, 13), batches).result()
    read = load(tmp_path / "session")["p"]
    assert read.positions == range(9, 13)
    assert [row.shape for row in read] == [(2, k + 1) for k in range(9, 13)]
    assert same_bits(read, patterns)
    with pytest.raises(ValueError, match="step"):
        read[::2]


def test_patterns_that_are_not_those_of_the_rows_are_refused():
    given = {"run_id": "r", "sample_id": None, "prompt_tokens": 10, "token_ids": [1, 2, 3]}
    segment = SegmentFacts("session", "model", None, "x", {}, {})
    with pytest.raises(ValueError, match="p: patterns at"):
        to_batch(segment, positions=[4, 5, 6], points={"p": some_patterns(3)}, **given)
    with pytest.raises(ValueError, match="heads"):
        Patterns(torch.zeros(11), 2, range(3))


def test_a_run_must_be_named_where_there_are_several(segment):
    with pytest.raises(ValueError, match="r0, r1"):
        load(segment[0])


def test_an_unknown_run_is_answered_with_those_there_are(segment):
    with pytest.raises(ValueError, match="'r9'.*r0, r1"):
        load(segment[0], "r9")


def test_the_only_run_needs_no_name_and_points_are_chosen_in_order(make, open_writer, tmp_path):
    points = {name: torch.randn(2, 3) for name in "abc"}
    made = make("r", points)
    open_writer().submit(made.facts, made.batches).result()
    assert list(load(tmp_path / "session", points=["c", "a"])) == ["c", "a"]
    with pytest.raises(ValueError, match="d was not recorded; there is a, b, c"):
        load(tmp_path / "session", points=["d"])


def test_writing_to_a_loaded_tensor_leaves_the_file_as_it_was(make, open_writer, tmp_path):
    made = make("r")
    open_writer().submit(made.facts, made.batches).result()
    load(tmp_path / "session")["layers.0.output"].zero_()
    assert torch.equal(load(tmp_path / "session")["layers.0.output"], made.points["layers.0.output"])


@pytest.mark.parametrize(
    "content", [b"", b"ARROW1", b"ARROW1\0\0", b"no arrow file at all", b"ARROW1\0\0" + b"\0" * 64]
)
def test_a_file_that_holds_no_run_is_named(tmp_path, content):
    path = tmp_path / "x.arrow"
    path.write_bytes(content)
    assert runs(path) == []
    assert not is_sealed(path)
    with pytest.raises(ValueError, match=r"x\.arrow.*no whole run"):
        load(path)


def test_an_arrow_file_of_others_holds_no_run(tmp_path):
    table = pa.table({"a": [1, 2]})
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), table.schema) as file:
        file.write_table(table)
    assert runs(tmp_path) == []


def test_sources_that_cannot_be_reached_are_refused():
    with pytest.raises(ValueError, match="of this machine"):
        load("file://elsewhere/x.arrow")
    with pytest.raises(ValueError, match="gopher://bucket/x.arrow"):
        load("gopher://bucket/x.arrow")
    with pytest.raises(ValueError, match="AWS_ACCESS_KEY_ID") as refused:
        load("s3://key:s3cret@bucket/x.arrow")
    assert "s3cret" not in str(refused.value)
    with pytest.raises(FileNotFoundError):
        load("file:///no/such/file.arrow")


def test_importing_the_reader_does_not_import_ray():
    check = "import sys, deployments.activations; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], cwd=REPOSITORY, check=True)
