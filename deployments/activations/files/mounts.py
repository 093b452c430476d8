"""Whether the disk that a store began on is still there."""

from __future__ import annotations

import errno
import os
from pathlib import Path


class Mount:
    """A root that was a mount point when the store began must be one: else files come to lie below it, out of sight."""

    def __init__(self, root: Path) -> None:
        """Look at a root, as the store begins."""
        self._root = root
        self._mounted = os.path.ismount(root)

    def check(self) -> None:
        """Raise FileNotFoundError where the disk is gone."""
        if self._mounted and not os.path.ismount(self._root):
            raise FileNotFoundError(errno.ENOENT, "nothing is mounted there any more", str(self._root))
