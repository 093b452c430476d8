"""A session's stored activations, pulled from the server into the results directory piece by piece."""

import shutil
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import httpx
from tqdm import tqdm

from deployments.activations.facts import check_session_id
from deployments.activations.reader.pulling import ChangedError, PullError, pull
from evals.config import EvalError
from evals.results.results import write_json
from evals.server.answers import Kind, asked_wait_s, is_absent, kind_of
from evals.server.client import MAX_POLL_S
from evals.server.keys import api_key, headers
from evals.server.outage import Outage

FOLDER = "activations"  # of the results directory; below it one named after the session
TRANSFER_FILE = "transferred.json"  # beside it, once all of it is there: what `transfer` returns
PIECE = ".piece"  # what is on its way
PIECE_BYTES = 256 << 20  # of stored runs, about: the most that an interruption loses
PIECE_RUNS = 250  # whose ids an address has room for
PAGE = 1000  # runs that the server lists at once
MAX_RESTARTS = 3  # times that a piece is begun again because the server's files changed

_T = TypeVar("_T")


class Patience:
    """Tries again what a server that is busy or away did not do, as `ChatClient` does."""

    def __init__(self, retries: int, max_outage: float) -> None:
        """Initializes the transfer without an outage.

        Args:
            retries: further attempts after the first, while the server is there.
            max_outage: seconds for which a server that is away is waited for.
        """
        self._retries = retries
        self._outage = Outage(max_outage)

    def __call__(self, work: Callable[[], _T]) -> _T:
        """What `work` returns.

        Raises:
            PullError: the server refuses, is away for too long, or busy or broken off too often.
        """
        failures, wait = 0, 1.0  # seconds
        while True:
            try:
                done = work()
            except PullError as error:
                kind, answer = _kind_of(error), error.answer
                broke_off = answer is not None and answer.is_success
                failures += kind == "busy" or broke_off  # the server is or was there
                if kind == "refused" or failures > self._retries:
                    raise
                wait = max(wait, 0.0 if answer is None else asked_wait_s(answer))
                if kind == "busy":
                    self._outage.met()
                else:
                    wait = min(wait, self._left_s(str(error), broke_off))
            else:
                self._outage.met()
                return done
            time.sleep(wait)
            wait = min(2 * wait, MAX_POLL_S)

    def _left_s(self, reason: str, broke_off: bool) -> float:
        """For how long a server that is away is still waited for."""
        outage = self._outage
        first = not outage.seconds
        outage.missed()
        if broke_off:  # it was there a moment ago
            outage.renewed()
        if (left_s := outage.left_s) <= 0:
            raise PullError(outage.given_up(reason))
        if first:
            limit = f"waiting for the server, {outage.limit_s:g} s at most"
            tqdm.write(f"evals.gsm8k: activations: {reason}; {limit}", file=sys.stderr)
        return left_s


def transfer(
    directory: Path,
    base_url: str,
    session_id: str,
    *,
    retries: int = 0,
    max_outage: float = 0.0,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Pulls the runs of a session that are not in the results directory yet.

    Args:
        directory: the results directory.
        base_url: the server's, ending in `/v1`. Its key is in `OPENAI_API_KEY`.
        session_id: the session.
        retries: further attempts of a request after the first, while the server is there.
        max_outage: seconds for which a server that is away is waited for.
        progress: whether to draw a bar; by default on a terminal.

    Returns:
        `path` below the directory, which `deployments.activations.load` takes, and its `bytes`, `files` and `runs`.

    Raises:
        EvalError: the session could not be pulled, or not all that the server lists. What came stays, and another
            call goes on.
    """
    patiently = Patience(retries, max_outage)
    folder, unfinished, said = (directory / FOLDER / name for name in (session_id, PIECE, TRANSFER_FILE))
    try:
        check_session_id(session_id)
        shutil.rmtree(unfinished, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        said.unlink(missing_ok=True)
        listed, each = _listed(base_url, session_id, patiently)
        there = transferred_runs(directory, session_id)
        missing = [run_id for run_id in listed if run_id not in there]
        many = max(1, min(PIECE_RUNS, PIECE_BYTES // max(1, each)))
        with tqdm(total=len(missing), desc="activations", unit="run", disable=_hidden(progress)) as bar:
            for first in range(0, len(missing), many):
                some = missing[first : first + many]
                _fetch(base_url, session_id, some, unfinished, folder, patiently)
                bar.update(len(some))
        there = transferred_runs(directory, session_id)
        if lacking := [run_id for run_id in listed if run_id not in there]:
            raise PullError(f"the server lists {_some(lacking)}, and sent no such run")
    except (PullError, httpx.HTTPError, OSError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise EvalError(f"activations of session {session_id} were not all transferred: {reason}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    sizes = [file.stat().st_size for file in folder.glob("*.arrow")]
    found = {
        "path": folder.relative_to(directory).as_posix(),
        "bytes": sum(sizes),
        "files": len(sizes),
        "runs": len(there),
    }
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


def _listed(base_url: str, session_id: str, patiently: Patience) -> tuple[list[str], int]:
    """The ids of a session's runs, the oldest first, and the mean bytes of one, 0 if the server does not report it.

    Raises:
        PullError: the server lists no runs, or says for ever that there are more.
    """
    ids: dict[str, None] = {}
    url = f"{base_url}/activations/session/{session_id}"
    with httpx.Client(headers=headers(), timeout=60) as http:
        more, after = True, dict[str, str]()
        while more:
            page = patiently(partial(_page, http, url, {"limit": PAGE, **after}))
            before = len(ids)
            ids |= dict.fromkeys(run["run_id"] for run in page["runs"])
            more = bool(page.get("has_more"))
            if more and len(ids) == before:
                raise PullError(f"{url} says that there are more runs than {before}, and lists none of them")
            after = {"after": next(reversed(ids), "")}
    size = page.get("bytes")
    return list(ids), (size if isinstance(size, int) else 0) // max(1, len(ids))


def _page(http: httpx.Client, url: str, params: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = http.get(url, params=params)
    except httpx.TransportError as error:
        raise PullError(str(error) or type(error).__name__) from error
    if not answer.is_success:
        raise PullError(f"{url} answered {answer.status_code}: {answer.text[:200]}", answer)
    try:
        page: dict[str, Any] = answer.json()
        [run["run_id"] for run in page["runs"]]
    except (ValueError, TypeError, KeyError) as error:
        raise PullError(f"{url} lists no runs: does the server record activations?") from error
    return page


def _fetch(
    base_url: str, session_id: str, some: Sequence[str], unfinished: Path, folder: Path, patiently: Patience
) -> None:
    """Pulls some runs, anew where they moved meanwhile; their files join the others once they are whole."""
    for left in reversed(range(MAX_RESTARTS + 1)):
        try:
            pulled = pull(
                base_url, session_id, unfinished, runs=some, api_key=api_key(), progress=False, patiently=patiently
            )
            break
        except ChangedError:
            if not left:
                raise
    for file in sorted(pulled.iterdir()):
        file.rename(folder / next(_free(folder)))
    pulled.rmdir()


def _some(ids: Sequence[str]) -> str:
    return ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")


def _free(folder: Path) -> Iterator[str]:
    number = sum(1 for _ in folder.glob("*.arrow"))
    while True:
        number += 1
        if not (folder / (name := f"pulled-{number:06}.arrow")).exists():
            yield name


def _kind_of(error: PullError) -> Kind:
    """What a failure means for another attempt; an answer that broke off is of a server that is away now."""
    if error.answer is not None and not error.answer.is_success:
        return kind_of(error.answer) if is_absent(error.answer) else "refused"
    cause = error.__cause__
    own = isinstance(cause, httpx.LocalProtocolError | httpx.UnsupportedProtocol) or _is_of_certificates(cause)
    return "away" if isinstance(cause, httpx.TransportError) and not own else "refused"


def _is_of_certificates(error: BaseException | None) -> bool:
    while error and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None


def _hidden(progress: bool | None) -> bool | None:
    return None if progress is None else not progress  # tqdm's None: hidden where there is no terminal
