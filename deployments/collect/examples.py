"""Examples, read from jsonl, parquet or csv and checked one at a time; what is recorded of them, and their outcomes."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from deployments.messages import Refusal
from deployments.points.capture import Capture
from deployments.points.token_choices import parse
from vitrine.runs.fetching import COLLECTED

PROMPTS = ("prompt", "text", "messages")  # an example has one of them
MOST_CHARACTERS = 256  # of a tag, and of an id
MOST_TAGS = 63  # a run has at most 64, and one is `COLLECTED` where a server stores it
MOST_FIELD = 1 << 24  # characters of a field of a csv file
AT_ONCE = 32  # texts in a request
ROWS = 256  # read from a Parquet file at once
LOST = "answer_lost"  # the code of a refusal of examples of which no answer came


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
    tags: Sequence[str] | None = None


def read(data: Path | Iterable[Mapping[str, Any]], fields: Fields) -> Iterator[Example | str]:
    """The examples of a file, or of rows in memory, in order; a text is an invalid row's place and its error.

    Raises:
        DataError: The file does not exist or has another format; from the iterator, it cannot be read.
    """
    if isinstance(data, Path):
        _check(data)
        _check_tags(data, fields.tags or ())
        unit = "line" if data.suffix == ".jsonl" else "row"
        return _examples(_rows(data), f"{data.name}, {unit}", fields)
    return _examples(enumerate(data, 1), "data, row", fields)


def _examples(rows: Iterable[Numbered], unit: str, fields: Fields) -> Iterator[Example | str]:
    for number, row in rows:
        place = f"{unit} {number}"
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


def _check(data: Path) -> None:
    if data.suffix not in _READERS:
        raise DataError(f"{data}: the name of a data file ends in one of {', '.join(_READERS)}")
    if not data.is_file():
        raise DataError(f"{data}: there is no such file")


def _check_tags(data: Path, tags: Sequence[str]) -> None:
    """Check that each of these fields is in some row of a file."""
    absent, known = set(tags), dict[str, None]()
    for _, row in _rows(data):
        if not absent:
            return
        if not isinstance(row, DataError):
            absent -= row.keys()
            known |= dict.fromkeys(row)
    if absent and known:
        raise DataError(f"--tags: no row has the field {min(absent)!r}; there is {', '.join(known)}")


def count(data: Path) -> int:
    """The number of rows including invalid ones; for a csv file an upper bound, because rows may span several lines.

    Raises:
        DataError: The file cannot be read.
    """
    _check(data)
    try:
        if data.suffix == ".parquet":
            return int(pq.read_metadata(data).num_rows)
        with data.open("rb") as lines:
            return sum(1 for line in lines if line.strip()) - (data.suffix == ".csv")
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{data}: {error}") from error


def _rows(data: Path) -> Iterator[Numbered]:
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


def _example(row: Mapping[str, Any] | DataError, number: int, place: str, fields: Fields) -> Example:
    """Convert a row to an example.

    Raises:
        DataError: The row is not an example; the message has the reason.
    """
    if isinstance(row, DataError):
        raise row
    prompts = [name for name in PROMPTS if row.get(name) is not None]
    if len(prompts) != 1:
        raise DataError(f"it needs one of the fields {', '.join(PROMPTS)}, and has {', '.join(prompts) or 'none'}")
    prompt = _messages(row["messages"]) if prompts == ["messages"] else row[prompts[0]]
    if not isinstance(prompt, (str, list)) or not prompt:
        raise DataError(f"{prompts[0]}: {str(prompt)[:50]!r} is not a text with at least one character")
    try:
        json.dumps(dict(row), ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise DataError("it has characters that UTF-8 cannot encode") from error
    id = number if row.get("id") is None else row["id"]
    if not isinstance(id, (str, int)) or isinstance(id, bool) or len(str(id)) > MOST_CHARACTERS:
        raise DataError(f"id: it is not a string or a whole number of up to {MOST_CHARACTERS} characters")
    return Example(place, str(id), prompt, _tags(row, fields))


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
    tags = {
        name: value if isinstance(value := row[given], str) else json.dumps(value, ensure_ascii=False, default=str)
        for name, given in source.items()
    }
    if COLLECTED in tags:
        raise DataError(
            f"field {COLLECTED!r}: the command uses a tag of this name: rename the field, or leave it out with --tags"
        )
    if len(tags) > MOST_TAGS:
        raise DataError(f"{len(tags)} fields would become tags, a run has at most {MOST_TAGS}: choose some with --tags")
    for name, value in tags.items():
        if max(len(name), len(value)) > MOST_CHARACTERS:
            message = f"field {source[name]!r}: {len(value)} characters, a tag has at most {MOST_CHARACTERS}"
            raise DataError(f"{message}: choose others with --tags")
    return tags


def _messages(value: Any) -> list[dict[str, Any]]:
    """A chat's messages; a csv file has them as JSON."""
    try:
        messages = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        messages = None
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    ):
        raise DataError("messages: it is not a list of objects with the texts `role` and `content`")
    chat = [{name: part for name, part in message.items() if part is not None} for message in messages]
    try:
        json.dumps(chat, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"messages: a field is not JSON: {error}") from error
    return chat


@dataclass(frozen=True)
class Settings:
    """The settings of a collection.

    Attributes:
        model: The model's id.
        session: The session of the runs.
        points: Names of points, with wildcards.
        tokens: The tokens to record, as `capture.tokens`.
        max_tokens: Tokens to generate after each prompt, greedily.
        loaded: Options of loading that change the model's results.
    """

    model: str
    session: str
    points: tuple[str, ...]
    tokens: str
    max_tokens: int
    loaded: str = ""

    def capture(self, examples: list[Example]) -> Capture:
        """The capture of a request with these examples."""
        return Capture.model_validate(
            {
                "points": list(self.points),
                "tokens": parse(self.tokens),
                "mode": "generate" if self.max_tokens else "trace",
                "return": "id",
                "store_text": True,
                "tags": [example.tags for example in examples],
                "sample_id": [example.id for example in examples],
            }
        )

    def name(self, example: Example) -> str:
        """The example's name; the same for the same example and settings, so that it is stored once."""
        tokens = "last" if self.tokens == "prompt_last" and not self.max_tokens else self.tokens  # mean the same
        text = json.dumps([asdict(self) | {"tokens": tokens}, example.id, example.prompt, example.tags], sort_keys=True)
        return f"run-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


@dataclass
class Outcome:
    """The outcome of some examples.

    Attributes:
        runs: The number of stored runs.
        tokens: Tokens of these runs, including generated ones.
        already_stored: The number of examples that were stored before or repeated.
        failures: The place of each other example, and the reason.
        refusal: Why no example can be stored: an error of the arguments, the engine or the server.
        seconds: From the collection's first request until the last of these runs was durable.
    """

    runs: int = 0
    tokens: int = 0
    already_stored: int = 0
    failures: list[str] = field(default_factory=list)
    refusal: str | None = None
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """The rate of the runs' tokens."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def __iadd__(self, other: Outcome) -> Outcome:
        """Add the figures of other examples, without the texts of their failures."""
        self.runs += other.runs
        self.tokens += other.tokens
        self.already_stored += other.already_stored
        self.seconds = max(self.seconds, other.seconds)
        return self

    def add(self, place: str, status: str, tokens: int, reason: str | None) -> None:
        """Count the run of the example at `place`, which is `stored` or failed for a reason."""
        if status == "stored":
            self.runs += 1
            self.tokens += tokens
        else:
            self.failures.append(f"{place}: {reason}")

    def refuse(self, place: str, refused: Refusal) -> None:
        """Count the rejected example at `place`."""
        if (refused.field or "").startswith("capture.points"):
            self.refusal = f"--points: {refused.message}"
        elif refused.field == "model":
            self.refusal = f"--model: {refused.message}"
        elif refused.status not in (400, 413, 422):  # not an error of the example
            self.refusal = f"{place}: {refused.message}"
        else:
            self.failures.append(f"{place}: {refused.message}")


def number(name: str) -> int:
    """64 bits of an example's name; the chance that two of a million are equal is one in 36 million."""
    return int(name.removeprefix("run-")[:16], 16)
