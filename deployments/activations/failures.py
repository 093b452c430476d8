"""What a failure of the disk means for the user."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from deployments.activations.facts import StoreError

_ADVICE = {
    errno.ENOSPC: "free space on the disk, or delete sessions",
    errno.EDQUOT: "free space under the quota, or delete sessions",
    errno.EFBIG: "raise the limit on file sizes, or make shards smaller",
    errno.EACCES: "let the server's user write there",
    errno.EPERM: "let the server's user write there",
    errno.EROFS: "remount the file system for writing",
    errno.ENOENT: "put the directory back, or mount it again",
    errno.ENOTDIR: "remove what stands where the session's directory belongs",
    errno.ELOOP: "remove the link where the session's directory belongs",
    errno.ENOLCK: "mount the file system with locks",
    errno.ENOSYS: "mount the file system with locks",
    errno.EOPNOTSUPP: "take a file system that has locks",
    errno.EAGAIN: "end the other process, or take another directory",
    errno.EMFILE: "raise the limit on open files",
}


def explain(root: object, error: Exception) -> StoreError:
    """The error that says what failed below `root`, and what to do."""
    advice = _ADVICE.get(
        getattr(error, "errno", None) or 0, "see that it can be reached and written, then send the request again"
    )
    return StoreError(f"The activation store at {root} failed ({error}): {advice}.")


@contextmanager
def explained(root: object) -> Iterator[None]:
    """While open, an OSError below `root` is raised as the StoreError of `explain`."""
    try:
        yield
    except OSError as error:
        raise explain(root, error) from error
