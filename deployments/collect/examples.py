"""Reads examples from jsonl, parquet or csv, one at a time, and checks each."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

PROMPTS = ("prompt", "text", "messages")  # an example has one of them
MOST_CHARACTERS = 256  # of a tag, and of an id
MOST_TAGS = 63  # a run has at most 64, and one is `NAME_TAG`
NAME_TAG = "collected"  # of a run stored by a server: the name of its example
MOST_FIELD = 1 << 24  # characters of a field of a csv file
AT_ONCE = 32  # texts in a request
ROWS = 256  # read from a Parquet file at once


class DataError(ValueError):
    """Data that cannot be collected; the message names the file and, for an error in a line, the line."""


Numbered = tuple[int, Mapping[str, Any] | DataError]  # the number or line from 1, and a row or the error in it


class Example(NamedTuple):
    """One prompt.

    Attributes:
        place: Its place in readable form: `data.jsonl, line 7`.
        id: Its id, or its number or line from 1.
        prompt: A text, or the messages of a chat.
        tags: The tags of its run, including `label` and `group`.
    """

    place: str
    id: str
    prompt: str | list[dict[str, Any]]
    tags: dict[str, str]


@dataclass(frozen=True)
class Fields:
    """The meaning of a row's fields.

    Attributes:
        label: The field that becomes the tag `label`; None for the field of that name, if there is one.
        group: The same of `group`.
        tags: The other fields that become tags; None for all.
    """

    label: str | None = None
    group: str | None = None
    tags: Sequence[str] | None = field(default=None)


def read(data: Path | Iterable[Mapping[str, Any]], fields: Fields) -> Iterator[Example | str]:
    """Read the examples of a file, or of rows in memory, in order; a text is an invalid row's place and its error.

    Raises:
        DataError: The file cannot be read, or has another format.
    """
    name = data.name if isinstance(data, Path) else "data"
    for number, row in _rows(data):
        place = f"{name}, {_UNITS.get(data.suffix if isinstance(data, Path) else '', 'row')} {number}"
        try:
            yield _example(row, number, place, fields)
        except DataError as error:
            yield f"{place}: {error}"


def together(examples: Iterable[Example]) -> list[list[Example]]:
    """Group examples into requests: texts of similar length, which share forward passes; each chat alone."""
    ordered = sorted(examples, key=lambda example: len(example.prompt))
    texts = [example for example in ordered if isinstance(example.prompt, str)]
    chats = [[example] for example in ordered if not isinstance(example.prompt, str)]
    return [texts[first : first + AT_ONCE] for first in range(0, len(texts), AT_ONCE)] + chats


def check(data: Path) -> None:
    """Check that a file exists and has a supported format.

    Raises:
        DataError: It does not exist, or has another format.
    """
    if data.suffix not in _READERS:
        raise DataError(f"{data}: the name of a data file ends in one of {', '.join(_READERS)}")
    if not data.is_file():
        raise DataError(f"{data}: there is no such file")


def check_tags(data: Path, tags: Sequence[str]) -> None:
    """Check that each of these fields is in some row of a file.

    Raises:
        DataError: One is in none; lists the fields that there are.
    """
    absent, known = set(tags), dict[str, None]()
    for _, row in _rows(data):
        if not absent:
            return
        if not isinstance(row, DataError):
            absent -= row.keys()
            known |= dict.fromkeys(row)
    if absent and known:
        raise DataError(f"--tags: no row has the field {min(absent)!r}; there is {', '.join(known)}")


def count(data: Path | Sequence[Any]) -> int:
    """The number of rows including invalid ones; for a csv file an upper bound, because rows may span several lines.

    Raises:
        DataError: The file cannot be read.
    """
    if not isinstance(data, Path):
        return len(data)
    check(data)
    try:
        if data.suffix == ".parquet":
            return int(pq.read_metadata(data).num_rows)
        with data.open("rb") as lines:
            return sum(1 for line in lines if line.strip()) - (data.suffix == ".csv")
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{data}: {error}") from error


def _rows(data: Path | Iterable[Mapping[str, Any]]) -> Iterator[Numbered]:
    if not isinstance(data, Path):
        yield from enumerate(data, 1)
        return
    check(data)
    try:
        yield from _READERS[data.suffix](data)
    except (OSError, pa.ArrowException, csv.Error) as error:
        raise DataError(f"{data}: {error}") from error


def _json_lines(path: Path) -> Iterator[Numbered]:
    with path.open("rb") as lines:
        yield from ((number, _json_object(line)) for number, line in enumerate(lines, 1) if line.strip())


def _json_object(line: bytes) -> Mapping[str, Any] | DataError:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8, or nested too deeply
        return DataError(f"it is not JSON: {error}")
    return row if isinstance(row, dict) else DataError("it is not a JSON object")


def _csv_rows(path: Path) -> Iterator[Numbered]:
    csv.field_size_limit(MOST_FIELD)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines, strict=True), 1):
            extra = row.pop(None, None)
            if extra is not None or None in row.values():
                yield number, DataError(f"it has {'more' if extra is not None else 'fewer'} fields than the header")
            else:
                yield number, {name: value for name, value in row.items() if name and value != ""}


def _parquet_rows(path: Path) -> Iterator[Numbered]:
    with pq.ParquetFile(path) as file:
        rows = (row for batch in file.iter_batches(ROWS) for row in batch.to_pylist())
        yield from enumerate(rows, 1)


_READERS = {".jsonl": _json_lines, ".parquet": _parquet_rows, ".csv": _csv_rows}
_UNITS = {".jsonl": "line"}


def _example(row: Mapping[str, Any] | DataError, number: int, place: str, fields: Fields) -> Example:
    """Convert a row to an example.

    Raises:
        DataError: The row is not an example; the message has the reason.
    """
    if isinstance(row, DataError):
        raise row
    given = [name for name in PROMPTS if row.get(name) is not None]
    if len(given) != 1:
        raise DataError(f"it needs one of the fields {', '.join(PROMPTS)}, and has {', '.join(given) or 'none'}")
    prompt = _messages(row["messages"]) if given[0] == "messages" else row[given[0]]
    if not isinstance(prompt, (str, list)) or not prompt:
        raise DataError(f"{given[0]}: {str(prompt)[:50]!r} is not a text with at least one character")
    try:
        json.dumps(dict(row), ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise DataError("it has characters that UTF-8 cannot encode") from error
    own = row.get("id")
    if not isinstance(own, (str, int, None.__class__)) or isinstance(own, bool) or len(str(own)) > MOST_CHARACTERS:
        raise DataError(f"id: it is not a string or a whole number of up to {MOST_CHARACTERS} characters")
    return Example(place, str(number if own is None else own), prompt, _tags(row, fields))


def _tags(row: Mapping[str, Any], fields: Fields) -> dict[str, str]:
    meant = {"label": fields.label or "label", "group": fields.group or "group"}
    for name, given in (("label", fields.label), ("group", fields.group)):
        if given and row.get(given) is None:
            raise DataError(f"it has no field {given!r}, which --{name} names")
    others = [name for name in row if name not in (*PROMPTS, "id", *meant.values())]
    if fields.tags is not None:
        others = [name for name in others if name in fields.tags]
    source = {name: given for name, given in meant.items() if row.get(given) is not None}
    source |= {name: name for name in others if name not in meant and row[name] is not None}
    tags = {name: _text(row[given]) for name, given in source.items()}
    if NAME_TAG in tags:
        raise DataError(
            f"field {NAME_TAG!r}: the command uses a tag of this name: rename the field, or leave it out with --tags"
        )
    if len(tags) > MOST_TAGS:
        raise DataError(f"{len(tags)} fields would become tags, a run has at most {MOST_TAGS}: choose some with --tags")
    for name, value in tags.items():
        if max(len(name), len(value)) > MOST_CHARACTERS:
            message = f"field {source[name]!r}: {len(value)} characters, a tag has at most {MOST_CHARACTERS}"
            raise DataError(f"{message}: choose others with --tags")
    return tags


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _messages(value: Any) -> list[dict[str, Any]]:
    """A chat's messages; a csv file has them as JSON."""
    try:
        messages = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        messages = None
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise DataError("messages: it is not a list of objects with the texts `role` and `content`")
    found = [{name: part for name, part in message.items() if part is not None} for message in messages]
    try:
        json.dumps(found, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"messages: a field is not JSON: {error}") from error
    return found


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
