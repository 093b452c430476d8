"""A session's stored activations, fetched from the server into the results directory piece by piece."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from deployments.activations.reader.pulling import TIMEOUT_S, PullError, chosen, write
from evals.config import EvalError
from evals.results.results import FOLDER, TRANSFER_FILE, write_json
from evals.server.keys import api_key
from vitrine.connection.blocking import wait
from vitrine.connection.transport import MAX_OUTAGE_S, Transport, api_root
from vitrine.runs.files import Entry
from vitrine.server_error import RequestFailed

PIECE_BYTES = 256 << 20  # of stored runs, about: the most that an interruption loses


def transfer(directory: Path, base_url: str, session_id: str) -> dict[str, Any]:
    """Fetches the runs of a session that are not in the results directory yet.

    Args:
        directory: the results directory.
        base_url: the server's. Its key is in `OPENAI_API_KEY`.
        session_id: the session.

    Returns:
        `path` below the directory, which `vitrine.load` takes, and its `bytes`, `files` and `runs`.

    Raises:
        EvalError: the session could not be fetched. What came stays, and another call goes on.
    """
    folder, summary = (directory / FOLDER / name for name in (session_id, TRANSFER_FILE))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        summary.unlink(missing_ok=True)
        fetched = transferred_runs(directory, session_id)
        wait(_fetch(base_url, session_id, fetched, folder))
    except (PullError, RequestFailed, OSError, ValueError, LookupError) as error:
        reason = str(error) or type(error).__name__
        raise EvalError(f"activations of session {session_id} were not all transferred: {reason}") from error
    sizes = [file.stat().st_size for file in folder.glob("*.arrow")]
    runs = len(transferred_runs(directory, session_id))
    path = folder.relative_to(directory).as_posix()
    record = {"path": path, "bytes": sum(sizes), "files": len(sizes), "runs": runs}
    write_json(summary, record)
    return record


async def _fetch(base_url: str, session_id: str, fetched: set[str], folder: Path) -> None:
    server = Transport(api_root(base_url), api_key(), TIMEOUT_S, max_outage=MAX_OUTAGE_S)
    try:
        for piece in _pieces([run for run in await chosen(server, session_id) if run["run_id"] not in fetched]):
            with TemporaryDirectory(prefix=".piece-", dir=folder.parent) as unfinished:
                await write(server, piece, Path(unfinished))
                for file in Path(unfinished).iterdir():
                    file.rename(folder / f"pulled-{uuid4().hex}.arrow")
    finally:
        await server.close()


def transferred_runs(directory: Path, session_id: str) -> set[str]:
    """The ids of the runs of a session that are in the results directory."""
    from deployments.activations import runs  # here: torch comes with it

    folder = directory / FOLDER / session_id
    return {run.run_id for run in runs(folder)} if folder.is_dir() else set()


def files_of(directory: Path, session_id: str, uri: str) -> Path:
    """The directory of a session's files: in the results if it was transferred, else the store's own.

    Args:
        directory: the results directory.
        session_id: the session.
        uri: of one of its files in the store.

    Raises:
        ValueError: neither can be read from here.
    """
    if any((transferred := directory / FOLDER / session_id).glob("*.arrow")):
        return transferred
    url = urlsplit(uri)
    folder = Path(unquote(url.path)).parent
    if url.scheme != "file" or url.netloc not in ("", "localhost") or not folder.is_dir():
        raise ValueError(
            f"{uri.rpartition('/')[0]} cannot be read from this machine: use --transfer-activations to copy the files",
        )
    return folder


def _pieces(runs: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Runs in the order of their files, about `PIECE_BYTES` of them at a time."""
    piece, size = list[Entry](), 0
    for run in sorted(runs, key=lambda run: (run["file"], run["offset"])):
        if piece and size + run["bytes"] > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(run)
        size += run["bytes"]
    if piece:
        yield piece
