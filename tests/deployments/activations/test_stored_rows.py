"""Rows of a stored run are read bit for bit, and only those requested."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load
from storing import store

from deployments.activations.index.index import Index
from deployments.activations.reader.stored_rows import read_rows
from deployments.activations.segments.segments import DamagedError
from deployments.activations.writer.writer import Writer
from deployments.errors import RequestError
from deployments.points.token_choices import Last, Positions, PromptLast, TextPiece

ROWS = 9  # of which the last is generated
MUCH = 1 << 20


@pytest.fixture(scope="module")
def stored(make, tmp_path_factory):
    """`stored(run_id)`: the store's directory, the entry of a run in one to three parts, and what was put into it."""
    root = tmp_path_factory.mktemp("stored")
    index = Index.open(root)
    writer = Writer(root, index)
    made = {}
    for parts in (1, 2, 3):
        points = {
            "layers.0.output": torch.randn(ROWS, 4).bfloat16(),
            "layers.1.attention.heads": torch.randn(ROWS, 2, 3),
        }
        points["layers.0.output"][1, 0] = torch.nan  # bits are bits
        made[f"r{parts}"] = make(f"r{parts}", points, parts=parts)
        writer.submit(made[f"r{parts}"].facts, made[f"r{parts}"].batches).result()
    yield lambda run_id: (root, index.find(run_id), made[run_id].points)
    writer.close()
    index.close()


@pytest.mark.parametrize("run_id", ["r1", "r2", "r3"])
@pytest.mark.parametrize(
    ("tokens", "positions"),
    [
        ("all", range(ROWS)),
        ("prompt", range(ROWS - 1)),
        ("generated", [ROWS - 1]),
        ("prompt_last", [ROWS - 2]),
        (PromptLast(prompt_last=3), range(ROWS - 4, ROWS - 1)),
        (Positions(positions=[7, 0, 3, 3, 8]), [7, 0, 3, 3, 8]),
    ],
)
def test_the_rows_of_the_tokens_asked_for_come_in_their_order_bit_for_bit(stored, run_id, tokens, positions):
    root, entry, points = stored(run_id)
    found = load(read_rows(root / entry.path, entry, [[name] for name in points], tokens, MUCH))
    for i, value in enumerate(points.values()):
        want = value[list(positions)]
        assert found[str(i)].dtype == want.dtype
        bits = torch.int16 if want.dtype == torch.bfloat16 else torch.int32
        assert torch.equal(found[str(i)].view(bits), want.view(bits))


def test_a_point_is_found_by_any_of_its_names_the_first_one_first(stored):
    root, entry, points = stored("r1")
    first, second = points
    names = [["unknown", second], [second, first], ["x", first, second]]
    found = load(read_rows(root / entry.path, entry, names, "prompt_last", MUCH))
    for i, name in enumerate((second, second, first)):
        assert found[str(i)].shape == (1, *points[name].shape[1:])


@pytest.mark.parametrize(
    ("points", "tokens", "most", "field", "code"),
    [
        (["layers.5.output"], "all", MUCH, "from.point", "point_not_recorded"),
        (["layers.0.output"], Positions(positions=[ROWS]), MUCH, "from.tokens", "invalid_value"),
        (["layers.0.output"], PromptLast(prompt_last=ROWS), MUCH, "from.tokens", "invalid_value"),
        (["layers.0.output"], Last(last=2), MUCH, "from.tokens", "ambiguous_tokens"),
        (["layers.0.output"], TextPiece(text="a"), MUCH, "from.tokens.text", "invalid_value"),
        (["layers.0.output"], "all", ROWS * 8 - 1, "from", "rows_too_large"),
    ],
)
def test_what_the_run_has_not_is_refused_by_its_field(stored, points, tokens, most, field, code):
    root, entry, _ = stored("r2")
    with pytest.raises(RequestError) as refused:
        read_rows(root / entry.path, entry, [points], tokens, most)
    assert (refused.value.field, refused.value.code) == (field, code)


def test_a_run_of_which_only_some_tokens_were_recorded_says_which(make, tmp_path):
    made = make("r", {"p": torch.randn(3, 4)}, prompt_tokens=8, tokens=9)  # rows 0 to 2
    store(tmp_path, made)
    entry = Index.scanned(tmp_path).find("r")
    path = tmp_path / entry.path
    assert len(load(read_rows(path, entry, [["p"]], "all", MUCH))["0"]) == 3
    with pytest.raises(RequestError, match="no row of its token 3; it recorded those of tokens 0 to 2"):
        read_rows(path, entry, [["p"]], "prompt", MUCH)
    other = entry._replace(facts=replace(entry.facts, run_id="other"))
    with pytest.raises(DamagedError, match="the run other cannot be read there"):
        read_rows(path, other, [["p"]], "prompt", MUCH)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_rows(path, entry, [["p"]], "all", MUCH)
