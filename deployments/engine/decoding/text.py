"""From token ids to text, one token at a time: whole characters only, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

MOST_WAITING = 32  # tokens in a sequence without text, each of which makes the tokenizer decode all of them again


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
        self._waiting: list[int] = []  # what the stream holds back: bytes of an unfinished character, special tokens
        self._last: int | None = None  # the last token that was text
        self._stop = tuple(stop)
        self._markers = markers or {}
        self._read = 0  # tokens
        self._after = 0  # tokens up to the last marker, or to the last text that was not waited for any longer
        self._marked = 0  # characters up to there
        self._emitted = 0
        self._pieces: list[str] = []
        self._pending = ""  # what is decoded and not emitted
        self._settled = 0  # characters that no stop string may end in any more
        self.stopped = False

    @property
    def length(self) -> int:
        """Characters so far, those held back and those after a stop string included."""
        return self._emitted + len(self._pending)

    def add(self, token: int, may_stop: bool = True) -> str:
        """Take one token and give the text that can be shown now.

        Characters wait for their last byte, and what may be the beginning of a stop string waits until it is
        not. Sets `stopped` when a stop string is complete; the text then ends before it.

        Args:
            token: Its id.
            may_stop: Without, a stop string that this token completes is text like any other; one that it
                begins may still end the text later.
        """
        self._read += 1
        if token in self._markers:
            self._append(self._markers[token])
            self._mark()
        elif (text := self._step(token)) is not None:
            self._append(text)
            self._last = token
            self._waiting.clear()
        else:
            self._wait(token)
        if not may_stop:
            self._settled = self.length
        return self._emit(hold=True)

    def _step(self, token: int) -> str | None:
        """The text that is whole with this token; None while a character is not."""
        try:
            text: str | None = self._stream.step(self._tokenizer.backend_tokenizer, token)
        except Exception as error:
            # tokenizers raises nothing narrower. A decoder with byte fallback reads bytes that are no UTF-8 in another
            # way once more text follows, and the stream refuses to change what it gave out.
            if "Invalid prefix" not in str(error):
                raise
            self._waiting.append(token)
            self._last = token
            self._restart()
            return ""
        return text

    def _wait(self, token: int) -> None:
        """Hold a token back; where there are too many, what they are is their text."""
        self._waiting.append(token)
        if len(self._waiting) >= MOST_WAITING:
            self._restart()

    def _restart(self) -> None:
        """Take the tokens that are held back as text, whatever they are, and begin a new stream after them."""
        self._append(self._decode(self._waiting))
        self._waiting.clear()
        self._mark()
        # Many decoders drop the space that begins a text.
        before = [] if self._last is None or "\ufffd" in self._decode([self._last]) else [self._last]
        self._stream = DecodeStream(ids=before, skip_special_tokens=True)

    def _append(self, text: str) -> None:
        self._pieces.append(text)
        self._pending += text

    def _mark(self) -> None:
        self._marked, self._after = self.length, self._read

    def _decode(self, tokens: Sequence[int]) -> str:
        decoded = self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(decoded)

    def close(self, tokens: Sequence[int]) -> str:
        """Give what was held back, an unfinished character as U+FFFD, when generation has ended.

        Args:
            tokens: All generated ids.
        """
        if self.stopped:
            return ""
        text, rest = "".join(self._pieces)[self._marked :], self._decode(tokens[self._after :])
        if rest.startswith(text):
            self._pending += rest[len(text) :]
        return self._emit(hold=False)

    def _emit(self, hold: bool) -> str:
        pending = self._pending
        settled = self._settled - self._emitted
        # Where each stop string that ends after what is settled ends first, and where it begins.
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
        self._pending = pending[end:]
        return pending[:end]

    def _held(self, pending: str) -> int:
        """Length of the longest end of `pending` that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            if any(stop.startswith(pending[-length:]) for stop in self._stop):
                return length
        return 0
