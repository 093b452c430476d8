"""Token ids to text, one token at a time: whole characters only, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

MOST_WAITING = 32  # consecutive tokens without text; the tokenizer decodes all of them again for each one


class TextStream:
    """The text of one request while it is generated."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        stop: Sequence[str] = (),
        markers: Mapping[int, str] | None = None,
        before: int | None = None,
    ) -> None:
        """Begin an empty text.

        Args:
            tokenizer: The model's tokenizer.
            stop: Strings that end it.
            markers: Special tokens that appear in the text, with their spelling; others are left out.
            before: The token that the text continues, if any.
        """
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._waiting: list[int] = []  # tokens held back: bytes of an unfinished character, special tokens
        self._last = before  # the last token that was text
        self._before = self._context()  # the token before those that `close` decodes again
        self._stream = DecodeStream(ids=self._before, skip_special_tokens=True)
        self._stop = tuple(stop)
        self._markers = markers or {}
        self._read = 0  # tokens
        self._after = 0  # tokens up to the last marker, or to the last text that was forced out
        self._marked = 0  # characters up to that position
        self._emitted = 0
        self._chunks: list[str] = []
        self._pending = ""  # decoded and not emitted
        self._settled = 0  # characters in which no stop string can end any more
        self.stopped = False

    @property
    def length(self) -> int:
        """Characters so far, including those held back and those after a stop string."""
        return self._emitted + len(self._pending)

    def add(self, token: int, may_stop: bool = True) -> str:
        """Add one token and return the text that can be shown now.

        An incomplete character waits for its last byte. A possible start of a stop string waits until it is ruled out.
        Sets `stopped` when a stop string is complete; the text then ends before it.

        Args:
            token: The token's id.
            may_stop: If false, a stop string that this token completes is ordinary text; one that it starts may still
                end the text later.
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
            self._waiting.append(token)
            if len(self._waiting) >= MOST_WAITING:
                self._restart()
        if not may_stop:
            self._settled = self.length
        return self._emit(hold=True)

    def _step(self, token: int) -> str | None:
        """The text that this token completes; None while a character is incomplete."""
        try:
            text: str | None = self._stream.step(self._backend, token)
        except Exception as error:
            # tokenizers raises nothing narrower. A decoder with byte fallback decodes invalid UTF-8 differently once
            # more text follows, and the stream refuses to change text that it has returned.
            if "Invalid prefix" not in str(error):
                raise
            self._waiting.append(token)
            self._last = token
            self._restart()
            return ""
        return text

    def _restart(self) -> None:
        """Emit the tokens held back as text, and start a new stream after them."""
        self._append(self._decode(self._waiting))
        self._waiting.clear()
        self._mark()
        self._stream = DecodeStream(ids=self._before, skip_special_tokens=True)

    def _context(self) -> list[int]:
        """What to decode a token after: many decoders drop a leading space. Empty within a character."""
        return [] if self._last is None or "\ufffd" in self._decode([self._last]) else [self._last]

    def _append(self, text: str) -> None:
        self._chunks.append(text)
        self._pending += text

    def _mark(self) -> None:
        self._marked, self._after, self._before = self.length, self._read, self._context()

    def _decode(self, tokens: Sequence[int]) -> str:
        decoded = self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(decoded)

    def close(self, tokens: Sequence[int]) -> str:
        """Return the text held back when generation has ended, with an unfinished character as U+FFFD.

        Args:
            tokens: All generated ids.
        """
        if self.stopped:
            return ""
        text, before = "".join(self._chunks)[self._marked :], self._before
        rest = self._decode([*before, *tokens[self._after :]]).removeprefix(self._decode(before))
        if rest.startswith(text):
            self._pending += rest[len(text) :]
        return self._emit(hold=False)

    def _emit(self, hold: bool) -> str:
        pending = self._pending
        if not self._stop:
            self._emitted += len(pending)
            self._pending = ""
            return pending
        settled = self._settled - self._emitted
        # For each stop string that ends after the settled text: where it first ends, and where it starts.
        stops = [
            (at + len(stop), at)
            for stop in self._stop
            if (at := pending.find(stop, max(0, settled - len(stop) + 1))) >= 0
        ]
        if stops:
            self.stopped = True
            end = min(stops)[1]
        else:
            end = len(pending) - (self._held(pending) if hold else 0)
        self._emitted += end
        self._pending = pending[end:]
        return pending[:end]

    def _held(self, pending: str) -> int:
        """Length of the longest suffix of `pending` that starts a stop string."""
        longest = max(map(len, self._stop)) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            if any(stop.startswith(pending[-length:]) for stop in self._stop):
                return length
        return 0
