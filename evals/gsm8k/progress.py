"""The live bar of one mode: running accuracy, and tokens per second."""

import sys

from tqdm import tqdm

from evals.task.trajectory import Sample


class Progress(tqdm):  # type: ignore[type-arg]  # it takes none at run time
    """One mode's bar."""

    def __init__(self, name: str, total: int) -> None:
        """Shows an empty bar.

        Args:
            name: the mode's.
            total: samples of the mode, those of an earlier run included.
        """
        super().__init__(total=total, desc=name, unit="sample", dynamic_ncols=True)
        self._answered = self._correct = self._tokens = 0

    def add(self, sample: Sample, *, earlier: bool = False) -> None:
        """Counts a sample; one of the run that is resumed counts in the accuracy, not in the speed."""
        self._answered += sample.correct is not None
        self._correct += bool(sample.correct)
        if earlier:
            self.initial += 1
        else:
            self._tokens += sample.completion_tokens
        if sample.outcome == "failed" and not earlier:
            tqdm.write(f"{sample.key} failed: {sample.error}", file=sys.stderr)
        shown = {"accuracy": f"{self._correct / self._answered:.1%}"} if self._answered else {}
        seconds = max(self.format_dict["elapsed"], 1e-3)
        self.set_postfix(shown | {"tok/s": f"{self._tokens / seconds:.0f}"}, refresh=False)
        self.update()
