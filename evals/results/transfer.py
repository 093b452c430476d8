"""A session's stored activations, fetched from the server into the results directory piece by piece."""

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tqdm import tqdm

from deployments.activations.facts import check_session_id
from evals.config import EvalError, some
from evals.results.results import FOLDER, TRANSFER_FILE, write_json
from evals.server.answers import RequestFailed
from evals.server.client import ChatClient
from evals.server.stored_runs import Entry, write_runs

PIECE = ".piece"  # what is on its way
PIECE_BYTES = 256 << 20  # of stored runs, about: the most that an interruption loses
PAGE = 100  # runs that the server lists at once, each with all of its points: some MiB
TIMEOUT_S = 60.0  # of one answer
_PLACE = ("run_id", "session_id", "owner", "file", "offset", "bytes")  # what is used of a listed run


def transfer(
    directory: Path, base_url: str, session_id: str, *, retries: int = 0, max_outage: float = 0.0
) -> dict[str, Any]:
    """Fetches the runs of a session that are not in the results directory yet.

    Args:
        directory: the results directory.
        base_url: the server's, ending in `/v1`. Its key is in `OPENAI_API_KEY`.
        session_id: the session.
        retries: further attempts of a request after the first, while the server is there.
        max_outage: seconds for which a server that is away is waited for.

    Returns:
        `path` below the directory, which `deployments.activations.load` takes, and its `bytes`, `files` and `runs`.

    Raises:
        EvalError: the session could not be fetched, or not all that the server lists. What came stays, and another
            call goes on.
    """
    folder, unfinished, said = (directory / FOLDER / name for name in (session_id, PIECE, TRANSFER_FILE))

    async def fetch() -> None:
        client = ChatClient(base_url, timeout=TIMEOUT_S, retries=retries, parallel=1, max_outage=max_outage)
        try:
            await _fetch_missing(client, directory, session_id, unfinished)
        finally:
            await client.close()

    try:
        check_session_id(session_id)
        folder.mkdir(parents=True, exist_ok=True)
        said.unlink(missing_ok=True)
        asyncio.run(fetch())
    except (RequestFailed, OSError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise EvalError(f"activations of session {session_id} were not all transferred: {reason}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    sizes = [file.stat().st_size for file in folder.glob("*.arrow")]
    runs = len(transferred_runs(directory, session_id))
    path = folder.relative_to(directory).as_posix()
    found = {"path": path, "bytes": sum(sizes), "files": len(sizes), "runs": runs}
    write_json(said, found)
    return found


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


async def _fetch_missing(client: ChatClient, directory: Path, session_id: str, unfinished: Path) -> None:
    """Fetches the runs that are not there, some at a time; their files join the others once they are whole.

    Raises:
        RequestFailed: the server refuses, is away for too long, or does not send what it lists.
        ValueError: what it sends is damaged, or no Arrow.
    """
    from deployments.activations.segments.verify import seal

    folder = directory / FOLDER / session_id
    listed = await _listed(client, f"activations/session/{session_id}")
    there = transferred_runs(directory, session_id)
    missing = [entry for run_id, entry in listed.items() if run_id not in there]
    with tqdm(total=len(missing), desc="activations", unit="run", disable=None) as bar:
        for piece in _pieces(missing):
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            with (fetched := unfinished / "fetched.arrow").open("wb") as file:
                await write_runs(client, piece, file)
            if not seal(fetched, set()):
                raise ValueError("a file is not what the server wrote: it has no whole run")
            last = max((int(file.stem.removeprefix("pulled-")) for file in folder.glob("pulled-*.arrow")), default=0)
            fetched.rename(folder / f"pulled-{last + 1:06}.arrow")
            bar.update(len(piece))
    there = transferred_runs(directory, session_id)
    if lacking := [run_id for run_id in listed if run_id not in there]:
        raise RequestFailed(f"the server lists {some(lacking)}, and sent no such run")


def _pieces(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Runs of one file each, in the order of the files' first runs, about `PIECE_BYTES` of them at a time."""
    files = dict[str, list[Entry]]()
    for entry in entries:
        files.setdefault(entry["file"], []).append(entry)
    for of in files.values():
        piece, size = list[Entry](), 0
        for entry in of:
            if piece and size + entry["bytes"] > PIECE_BYTES:
                yield piece
                piece, size = [], 0
            piece.append(entry)
            size += entry["bytes"]
        yield piece


async def _listed(client: ChatClient, url: str) -> dict[str, Entry]:
    """What the server lists of a session's runs, the oldest first.

    Raises:
        RequestFailed: the server lists no runs, or says for ever that there are more.
    """
    found: dict[str, Entry] = {}
    more, after = True, dict[str, str]()
    while more:
        page = await client.read(url, limit=PAGE, **after)
        before = len(found)
        try:
            found |= {run["run_id"]: {name: run[name] for name in _PLACE if name in run} for run in page["runs"]}
            whole = all({"file", "bytes"} <= entry.keys() for entry in found.values())
        except (TypeError, KeyError) as error:
            raise RequestFailed(f"{url} lists no runs: does the server record activations?") from error
        if not whole:
            raise RequestFailed(f"{url} does not list where runs lie in their files")
        more = bool(page.get("has_more"))
        if more and len(found) == before:
            raise RequestFailed(f"{url} says that there are more runs than {before}, and lists none of them")
        after = {"after": next(reversed(found), "")}
    return found
