"""From token ids to text, a token at a time: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast


class TextStream:
    """The text of one request as it grows."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, stop: Sequence[str] = (), markers: Mapping[int, str] | None = None
    ) -> None:
        """Begin a text.

        Args:
            tokenizer: The model's.
            stop: Strings that end it.
            markers: Special tokens that are text, and how they read; others are left out.
        """
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._markers = markers or {}
        self._marked = 0  # characters up to the last marker
        self._emitted = 0
        self._decoded = ""
        self._settled = 0  # characters that no stop string may end in any more
        self.stopped = False

    @property
    def length(self) -> int:
        """Characters so far, those held back and those behind a stop string included."""
        return len(self._decoded)

    def add(self, token: int, may_stop: bool = True) -> str:
        """Take one token and give the text that can be shown now.

        Characters wait for their last byte, and what may be the beginning of a stop string waits until it is
        not. Sets `stopped` when a stop string is complete; the text then ends before it.

        Args:
            token: Its id.
            may_stop: Without, a stop string that this token completes is text like any other; one that it
                begins may still end the text later.
        """
        if token in self._markers:
            self._decoded += self._markers[token]
            self._marked = len(self._decoded)
        else:
            self._decoded += self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        if not may_stop:
            self._settled = len(self._decoded)
        return self._emit(hold=True)

    def close(self, tokens: Sequence[int]) -> str:
        """Give what was held back, an unfinished character as U+FFFD, when generation has ended.

        Args:
            tokens: All generated ids.
        """
        if self.stopped:
            return ""
        last = max((i for i, token in enumerate(tokens) if token in self._markers), default=-1)
        rest = list(tokens[last + 1 :])
        text = self._tokenizer.decode(rest, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        whole = self._decoded[: self._marked] + str(text)
        if whole.startswith(self._decoded):
            self._decoded = whole
        return self._emit(hold=False)

    def _emit(self, hold: bool) -> str:
        pending = self._decoded[self._emitted :]
        settled = self._settled - self._emitted
        # Where each stop string that ends behind what is settled ends first, and where it begins.
        found = [
            (at + len(stop), at)
            for stop in self._stop
            if (at := pending.find(stop, max(0, settled - len(stop) + 1))) >= 0
        ]
        if found:
            self.stopped = True
            end = min(found)[1]
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
