"""Files of examples: three formats, fields that become tags, and broken lines."""

from __future__ import annotations

import csv
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.collect.examples import DataError, Example, Fields, count, read

ROWS = [
    {"text": "A dog is a mammal.", "id": "a", "label": True, "group": "dog", "topic": "animals"},
    {"text": "A dog is a bird.", "id": "b", "label": False, "group": "dog", "topic": "animals"},
]


def examples(data: Any, **fields: Any) -> list[Example]:
    found = list(read(data, Fields(**fields)))
    assert all(isinstance(item, Example) for item in found), found
    return [item for item in found if isinstance(item, Example)]


def broken(rows: list[Any], **fields: Any) -> str:
    (item,) = read(rows, Fields(**fields))
    assert isinstance(item, str)
    return str(item)


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as out:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            writer.writerows({name: str(value).lower() for name, value in row.items()} for row in rows)
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_three_formats_hold_the_same_examples(tmp_path: Path, suffix: str) -> None:
    rows = [row | {"text": row["text"].lower()} for row in ROWS]
    path = written(tmp_path / f"data.{suffix}", rows)
    found = examples(path)
    assert count(path) == 2
    assert [item.id for item in found] == ["a", "b"]
    assert [item.prompt for item in found] == ["a dog is a mammal.", "a dog is a bird."]
    assert found[1].tags == {"label": "false", "group": "dog", "topic": "animals"}


def test_a_misspelt_tag_is_refused_with_the_fields_that_there_are(tmp_path: Path) -> None:
    path = written(tmp_path / "data.jsonl", [{"text": "a"}, {"text": "b", "topic": "animals"}])
    read(path, Fields(tags=["topic"]))
    with pytest.raises(DataError, match="no row has the field 'topik'; there is text, topic"):
        read(path, Fields(tags=["topic", "topik"]))


def test_named_fields_become_the_label_and_the_group_and_others_keep_their_names() -> None:
    row = {"prompt": "2 + 2 =", "truth": 4, "who": "ann", "level": 0.5, "note": None, "label": "unused"}
    (found,) = examples([row], label="truth", group="who")
    assert found.tags == {"label": "4", "group": "ann", "level": "0.5"}
    assert examples([row], label="truth", group="who", tags=[])[0].tags == {"label": "4", "group": "ann"}


def test_messages_are_a_chat_and_an_example_without_an_id_is_named_by_its_number(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    rows = [{"messages": chat}, {"messages": json.dumps(chat)}]
    path = written(tmp_path / "chats.jsonl", rows)
    assert [(item.id, item.prompt) for item in examples(path)] == [("1", chat), ("2", chat)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "text": "b"},
            "fields prompt, text, messages, and has prompt, text",
        ),
        ({"label": 1}, "row 1: it needs one of the fields prompt, text, messages, and has none"),
        ({"prompt": ""}, "row 1: prompt: '' is not a text"),
        ({"prompt": 7}, "row 1: prompt: '7' is not a text"),
        ({"messages": [{"role": "user"}]}, "messages: it is not a list of objects"),
        ({"messages": "[{"}, "messages: it is not a list of objects"),
        ({"prompt": "a", "id": 1.5}, "id: it is not a string or a whole number"),
        ({"prompt": "a", "essay": "b" * 257}, "field 'essay': 257 characters, a tag has at most 256"),
        ({"prompt": "a", **{f"f{n}": n for n in range(65)}}, "65 fields would become tags"),
    ],
)
def test_a_row_that_is_no_example_is_named_with_the_reason(row: dict[str, Any], message: str) -> None:
    assert message in broken([row])


def test_a_row_without_the_named_label_is_broken() -> None:
    assert "it has no field 'truth', which --label names" in broken([{"prompt": "a"}], label="truth")


def test_a_broken_line_does_not_hide_those_after_it(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\nnonsense\n[1]\n"\xff"\n{"prompt": "b"}\n')
    found = list(read(path, Fields()))
    assert [str(item).split(":")[0] for item in found if isinstance(item, str)] == [
        f"data.jsonl, line {number}" for number in (3, 4, 5)
    ]
    assert [(item.prompt, item.place) for item in found if isinstance(item, Example)] == [
        ("a", "data.jsonl, line 1"),
        ("b", "data.jsonl, line 6"),
    ]


@pytest.mark.parametrize("name", ["missing.jsonl", "data.txt", "broken.parquet"])
def test_a_file_that_cannot_be_read_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    if name != "missing.jsonl":
        (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match=name):
        list(read(tmp_path / name, Fields()))


@given(
    st.dictionaries(
        st.text(max_size=20),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
            max_leaves=5,
        ),
    )
)
def test_any_row_is_an_example_or_is_named(row: dict[str, Any]) -> None:
    (item,) = read([{"prompt": "a"} | row], Fields())
    if isinstance(item, Example):
        assert all(isinstance(value, str) and len(value) <= 256 for value in item.tags.values())
    else:
        assert item.startswith("data, row 1: ")


def test_a_csv_file_may_have_a_column_without_a_name_as_pandas_writes_and_rows_of_another_length(
    tmp_path: Path,
) -> None:
    (path := tmp_path / "data.csv").write_text(",prompt\n0,So?\n1,Oh?,more\n2\n")
    first, more, fewer = read(path, Fields())
    assert isinstance(first, Example)
    assert (first.prompt, first.tags) == ("So?", {})
    assert (more, fewer) == tuple(
        f"data.csv, row {row}: it has {many} fields than the header" for row, many in ((2, "more"), (3, "fewer"))
    )


def test_a_message_with_a_field_that_is_not_json_is_named() -> None:
    [found] = read([{"messages": [{"role": "user", "content": "So?", "at": datetime(2026, 1, 1)}]}], Fields())
    assert "messages: a field is not JSON" in str(found)
