"""Rows of a stored run are read bit for bit, and only those requested."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.files.places import file_at
from deployments.activations.reader.stored_rows import read_rows
from deployments.activations.writer.writer import Writer
from deployments.errors import RequestError
from deployments.points.token_choices import Last, Positions, PromptLast, TextPiece

ROWS = 9  # of which the last is generated
MUCH = 1 << 20


@pytest.fixture(scope="module")
def stored(make, tmp_path_factory):
    """`stored(run_id)`: the catalogue's entry of a run in one to three parts, and what was put into it."""
    root = tmp_path_factory.mktemp("stored")
    catalogue = Catalogue.rebuild(root)
    writer = Writer(root, catalogue)
    made = {}
    for parts in (1, 2, 3):
        points = {
            "layers.0.output": torch.randn(ROWS, 4).bfloat16(),
            "layers.1.attention.heads": torch.randn(ROWS, 2, 3),
        }
        points["layers.0.output"][1, 0] = torch.nan  # bits are bits
        made[f"r{parts}"] = make(f"r{parts}", points, parts=parts)
        writer.submit(made[f"r{parts}"].facts, made[f"r{parts}"].batches).result()
    yield lambda run_id: (catalogue.find(run_id), made[run_id].points)
    writer.close()


def positions_of(tokens):
    match tokens:
        case "all":
            return list(range(ROWS))
        case "prompt":
            return list(range(ROWS - 1))
        case "generated":
            return [ROWS - 1]
        case "prompt_last":
            return [ROWS - 2]
        case "generated_last":
            return [ROWS - 1]
        case PromptLast():
            return list(range(ROWS - 1 - tokens.prompt_last, ROWS - 1))
    return tokens.positions


choices = st.one_of(
    st.sampled_from(["all", "prompt", "generated", "prompt_last", "generated_last"]),
    st.builds(PromptLast, prompt_last=st.integers(1, ROWS - 1)),
    st.builds(Positions, positions=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=12)),
)


@given(st.sampled_from(["r1", "r2", "r3"]), choices)
def test_the_rows_of_the_tokens_asked_for_come_in_their_order_bit_for_bit(stored, run_id, tokens):
    entry, points = stored(run_id)
    found = load(read_rows(file_at(entry.uri), entry, [[name] for name in points], tokens, MUCH))
    for i, value in enumerate(points.values()):
        want = value[positions_of(tokens)]
        assert found[str(i)].dtype == want.dtype
        bits = torch.int16 if want.dtype == torch.bfloat16 else torch.int32
        assert torch.equal(found[str(i)].view(bits), want.view(bits))


def test_a_point_is_found_by_any_of_its_names_the_first_one_first(stored):
    entry, points = stored("r1")
    first, second = points
    found = load(
        read_rows(
            file_at(entry.uri), entry, [["unknown", second], [second, first], ["x", first, second]], "prompt_last", MUCH
        )
    )
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
    entry, _ = stored("r2")
    with pytest.raises(RequestError) as refused:
        read_rows(file_at(entry.uri), entry, [points], tokens, most)
    assert (refused.value.field, refused.value.code) == (field, code)


def test_a_run_of_which_only_some_tokens_were_recorded_says_which(make, tmp_path):
    made = make("r", {"p": torch.randn(3, 4)}, prompt_tokens=8, tokens=9)  # rows 0 to 2
    catalogue = Catalogue.rebuild(tmp_path)
    writer = Writer(tmp_path, catalogue)
    writer.submit(made.facts, made.batches).result()
    entry = catalogue.find("r")
    assert len(load(read_rows(file_at(entry.uri), entry, [["p"]], "all", MUCH))["0"]) == 3
    with pytest.raises(RequestError, match="no row of its token 3; it recorded those of tokens 0 to 2"):
        read_rows(file_at(entry.uri), entry, [["p"]], "prompt", MUCH)
    writer.close()
    shutil.rmtree(tmp_path / "session")
    with pytest.raises(FileNotFoundError):
        read_rows(file_at(entry.uri), entry, [["p"]], "all", MUCH)
    assert catalogue.find("other") is None
