"""A session's stored activations, fetched from the server into the results directory piece by piece."""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tqdm import tqdm

from deployments.activations.facts import check_session_id
from deployments.activations.reader.pulling import PullError, keep
from evals.config import EvalError, some
from evals.results.results import FOLDER, TRANSFER_FILE, write_json
from evals.server.answers import RequestFailed
from evals.server.client import ChatClient

PIECE = ".piece"  # what is on its way
PIECE_BYTES = 256 << 20  # of stored runs, about: the most that an interruption loses
PIECE_RUNS = 250  # whose ids an address has room for
PAGE = 100  # runs that the server lists at once, each with all of its points: some MiB
TIMEOUT_S = 330.0  # of one answer: a server may look through a large session first


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
    except (RequestFailed, PullError, OSError, ValueError) as error:
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
        PullError: what it sends is damaged, or no Arrow.
    """
    folder, url = directory / FOLDER / session_id, f"activations/session/{session_id}"
    listed, each = await _listed(client, url)
    there = transferred_runs(directory, session_id)
    missing = [run_id for run_id in listed if run_id not in there]
    many = max(1, min(PIECE_RUNS, PIECE_BYTES // max(1, each)))
    with tqdm(total=len(missing), desc="activations", unit="run", disable=None) as bar:
        for first in range(0, len(missing), many):
            piece = missing[first : first + many]
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            with tempfile.TemporaryFile(dir=unfinished) as body:
                await client.download(f"{url}/data", {"run": piece, "format": "arrow"}, body)
                body.seek(0)
                keep(body, unfinished, url)
            last = max((int(file.stem.removeprefix("pulled-")) for file in folder.glob("pulled-*.arrow")), default=0)
            for number, file in enumerate(sorted(unfinished.iterdir()), last + 1):
                file.rename(folder / f"pulled-{number:06}.arrow")
            bar.update(len(piece))
    there = transferred_runs(directory, session_id)
    if lacking := [run_id for run_id in listed if run_id not in there]:
        raise RequestFailed(f"the server lists {some(lacking)}, and sent no such run")


async def _listed(client: ChatClient, url: str) -> tuple[list[str], int]:
    """The ids of a session's runs, the oldest first, and the mean bytes of one, 0 if the server does not report it.

    Raises:
        RequestFailed: the server lists no runs, or says for ever that there are more.
    """
    ids: dict[str, None] = {}
    more, after = True, dict[str, str]()
    while more:
        page = await client.read(url, limit=PAGE, **after)
        before = len(ids)
        try:
            ids |= dict.fromkeys(run["run_id"] for run in page["runs"])
        except (TypeError, KeyError) as error:
            raise RequestFailed(f"{url} lists no runs: does the server record activations?") from error
        more = bool(page.get("has_more"))
        if more and len(ids) == before:
            raise RequestFailed(f"{url} says that there are more runs than {before}, and lists none of them")
        after = {"after": next(reversed(ids), "")}
    size = page.get("bytes")
    return list(ids), (size if isinstance(size, int) else 0) // max(1, len(ids))
