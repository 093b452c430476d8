"""The live bar of one mode: running accuracy, and tokens per second of late."""

import sys
import time
from collections import deque
from types import TracebackType
from typing import Self

from tqdm import tqdm

from evals.task.trajectory import Sample

WINDOW = 30.0  # seconds that tokens per second are taken over


class Progress:
    """A context around one mode's bar."""

    def __init__(self, name: str, total: int) -> None:
        """Shows an empty bar.

        Args:
            name: the mode's.
            total: samples of the mode, those of an earlier run included.
        """
        self._bar = tqdm(total=total, desc=name, unit="sample", dynamic_ncols=True)
        self._began = time.monotonic()
        self._recent: deque[tuple[float, int]] = deque()  # when a sample came, its tokens
        self._answered = self._correct = self._tokens = 0

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the bar as it is."""
        self._bar.close()

    def earlier(self, sample: Sample) -> None:
        """Counts a sample of the run that is resumed: in the accuracy, not in the speed."""
        self._count(sample)
        self._bar.initial += 1
        self._bar.update()

    def add(self, sample: Sample) -> None:
        """Counts a sample that has just come."""
        self._count(sample)
        now = time.monotonic()
        self._recent.append((now, sample.completion_tokens))
        self._tokens += sample.completion_tokens
        while self._recent[0][0] < now - WINDOW:
            self._tokens -= self._recent.popleft()[1]
        if sample.outcome == "failed":
            tqdm.write(f"{sample.key} failed: {sample.error}", file=sys.stderr)
        self._bar.set_postfix(self._shown(now), refresh=False)
        self._bar.update()

    def _count(self, sample: Sample) -> None:
        self._answered += sample.correct is not None
        self._correct += bool(sample.correct)

    def _shown(self, now: float) -> dict[str, str]:
        seconds = min(WINDOW, max(now - self._began, 1e-3))
        shown = {"accuracy": f"{self._correct / self._answered:.1%}"} if self._answered else {}
        return shown | {"tok/s": f"{self._tokens / seconds:.0f}"}
