"""From token ids to text, a token at a time: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast


class TextStream:
    """The text of one request as it grows."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._emitted = 0
        self._decoded = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Take one token and give the text that can be shown now.

        Characters wait for their last byte, and what may be the beginning of a stop string waits until it is
        not. Sets `stopped` when a stop string is complete; the text then ends before it.
        """
        self._decoded += self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        return self._emit(hold=True)

    def close(self, tokens: Sequence[int]) -> str:
        """Give what was held back, an unfinished character as U+FFFD, when generation has ended.

        Args:
            tokens: All generated ids.
        """
        if self.stopped:
            return ""
        whole = str(self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))
        if whole.startswith(self._decoded):
            self._decoded = whole
        return self._emit(hold=False)

    def _emit(self, hold: bool) -> str:
        pending = self._decoded[self._emitted :]
        found = [at for stop in self._stop if (at := pending.find(stop)) >= 0]
        if found:
            self.stopped = True
            end = min(found)
        else:
            end = len(pending) - (self._held(pending) if hold else 0)
        self._emitted += end
        return pending[:end]

    def _held(self, pending: str) -> int:
        """Length of the longest end of `pending` that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            if any(stop.startswith(pending[-length:]) for stop in self._stop):
                return length
        return 0
