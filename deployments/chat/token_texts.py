"""The text of single tokens, and the bytes that each one adds to an answer."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from deployments.engine.request import LayerTokens, LensLayers, Logprob
from deployments.messages import Entry

BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
LEAST = -9999.0  # OpenAI's logprob of a nearly impossible token; JSON has no -inf


class TokenText(NamedTuple):
    r"""One token as written.

    Attributes:
        text: Its text; bytes that are not a whole character are written as `\xe2`.
        raw: Its bytes; those of all tokens join to the answer's UTF-8. None if it adds no text.
        numbers: The same bytes as JSON has them.
    """

    text: str
    raw: bytes | None
    numbers: list[int] | None


class TokenTexts:
    """The texts of one tokenizer's tokens, each computed once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder
        decoders = _kinds(tokenizer.backend_tokenizer.decoder)
        self._of_bytes, self._falls_back = "ByteLevel" in decoders, "ByteFallback" in decoders
        self._before = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._known: dict[int, TokenText] = {}

    def scored(self, tokens: Sequence[int], logprobs: Sequence[Logprob], offset: int = 0) -> list[tuple[Entry, int]]:
        """Tokens with their logprobs and top tokens, after `offset` characters of text; see `Piece.logprobs`."""
        entries = []
        for token, logprob in zip(tokens, logprobs, strict=True):
            entry = self._scored(token, logprob.logprob)
            entry["top_logprobs"] = [self._scored(likely, value) for likely, value in logprob.top]
            entries.append((entry, offset + logprob.offset))
        return entries

    def of_prompt(
        self, tokens: Sequence[int], logprobs: Sequence[Logprob], offsets: Sequence[int]
    ) -> list[tuple[Entry, int]]:
        """A prompt's tokens with their logprobs and offsets; the first token has no logprob."""
        first = self._scored(tokens[0], 0.0) | {"logprob": None, "top_logprobs": []}
        placed = [one._replace(offset=offset) for one, offset in zip(logprobs, offsets[1:], strict=True)]
        return [(first, offsets[0]), *self.scored(tokens[1:], placed)]

    def lens(self, tokens: Sequence[int], asked: LensLayers, lens: Sequence[Sequence[LayerTokens]]) -> list[Entry]:
        """Tokens with the logit lens of the requested layers; see `Piece.lens`."""
        return [
            self._identified(token) | {"layers": list(map(self._layer, asked.layers, layers))}
            for token, layers in zip(tokens, lens, strict=True)
        ]

    def _layer(self, number: int, found: LayerTokens) -> Entry:
        layer: Entry = {"layer": number, "top": [self._identified(token, logprob) for token, logprob in found.top]}
        if found.targets:
            layer["targets"] = [
                self._identified(token, logprob) | {"rank": rank} for token, logprob, rank in found.targets
            ]
        return layer

    def _scored(self, token: int, logprob: float) -> Entry:
        text, _, numbers = self.of(token)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": numbers}

    def _identified(self, token: int, logprob: float | None = None) -> Entry:
        text, _, numbers = self.of(token)
        entry = {"token": text, "token_id": token, "bytes": numbers}
        return entry if logprob is None else entry | {"logprob": max(logprob, LEAST)}

    def of(self, token: int) -> TokenText:
        """One token by its id."""
        if token not in self._known:
            text, raw = self._spell(token)
            self._known[token] = TokenText(text, raw, None if raw is None else list(raw))
        return self._known[token]

    def shown(self, token: int) -> bytes:
        """The bytes that a token adds to a repeated prompt, in which special tokens are text."""
        if (added := self._added.get(token)) is not None:
            return str(added.content).encode()
        return self.of(token).raw or b""

    def _spell(self, token: int) -> tuple[str, bytes | None]:
        if (added := self._added.get(token)) is not None:
            return added.content, None if added.special else added.content.encode()
        piece = self._tokenizer.backend_tokenizer.id_to_token(token)
        if piece is None:  # models pad their vocabulary beyond that of the tokenizer
            return f"token_id:{token}", None
        raw = self._bytes(token, piece)
        return raw.decode(errors="backslashreplace"), raw

    def _bytes(self, token: int, piece: str) -> bytes:
        if self._of_bytes and all(character in BYTES for character in piece):
            return bytes(BYTES[character] for character in piece)
        if self._falls_back and (byte := BYTE_FALLBACK.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        # After another token, because many decoders drop a leading space.
        before = self._decode(self._before)
        return self._decode([*self._before, token]).removeprefix(before).encode()

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


class TextOffsets:
    """The start of each token in a growing text. Special tokens count as text.

    Attributes:
        ends: The number of characters before each token, and after the last.
    """

    def __init__(self, token_texts: TokenTexts) -> None:
        self._token_texts = token_texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parts = list[str]()
        self.ends = [0]

    def add(self, tokens: Iterable[int]) -> None:
        """Add tokens. If one ends within a character, the next token starts at that character."""
        for token in tokens:
            part = self._decoder.decode(self._token_texts.shown(token))
            self._parts.append(part)
            self.ends.append(self.ends[-1] + len(part))

    def close(self) -> str:
        """End the text and return all of it."""
        return "".join(self._parts) + self._decoder.decode(b"", final=True)


def _kinds(decoder: Any) -> set[str]:
    """The types of a tokenizer's decoder, including nested ones."""
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {state["type"], *(inner["type"] for inner in state.get("decoders", ()))}
