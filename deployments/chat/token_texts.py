"""The text of single tokens, and the bytes that each one adds to an answer."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from deployments.engine.request import LayerTokens, LensLayers, Logprob
from deployments.messages import LayerTop, ScoredToken, TokenLayers, TokenLogprob, TokenText

BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """The texts of one tokenizer's tokens, each computed once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder
        decoders = _kinds(tokenizer.backend_tokenizer.decoder)
        self._of_bytes, self._falls_back = "ByteLevel" in decoders, "ByteFallback" in decoders
        self._before = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._known: dict[int, TokenText] = {}

    def scored(self, tokens: Sequence[int], logprobs: Sequence[Logprob], offset: int = 0) -> list[TokenLogprob]:
        """Tokens with their logprobs and top tokens, after `offset` characters of text."""
        return [
            TokenLogprob(
                ScoredToken(*self.of(token), logprob.logprob),
                tuple(ScoredToken(*self.of(likely), value) for likely, value in logprob.top),
                offset + logprob.offset,
            )
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]

    def seen(
        self, tokens: Sequence[int], asked: LensLayers, lens: Sequence[Sequence[LayerTokens]]
    ) -> list[TokenLayers]:
        """Tokens with the lens of the requested layers."""

        def layer(number: int, lens: LayerTokens) -> LayerTop:
            top = tuple((id, self.of(id), logprob) for id, logprob in lens.top)
            return LayerTop(number, top, tuple((id, self.of(id), logprob, rank) for id, logprob, rank in lens.targets))

        return [
            TokenLayers(token, self.of(token), tuple(map(layer, asked.layers, layers)))
            for token, layers in zip(tokens, lens, strict=True)
        ]

    def of_prompt(
        self, tokens: Sequence[int], logprobs: Sequence[Logprob], offsets: Sequence[int]
    ) -> list[TokenLogprob]:
        """A prompt's tokens with their logprobs and offsets; the first token has no logprob."""
        first = TokenLogprob(ScoredToken(*self.of(tokens[0]), None), (), offsets[0])
        placed = [logprob._replace(offset=offset) for logprob, offset in zip(logprobs, offsets[1:], strict=True)]
        return [first, *self.scored(tokens[1:], placed)]

    def of(self, token: int) -> TokenText:
        """One token by its id."""
        if token not in self._known:
            self._known[token] = self._spell(token)
        return self._known[token]

    def shown(self, token: int) -> bytes:
        """The bytes that a token adds to a repeated prompt, in which special tokens are text."""
        if (added := self._added.get(token)) is not None:
            return str(added.content).encode()
        return self.of(token).raw or b""

    def _spell(self, token: int) -> TokenText:
        if (added := self._added.get(token)) is not None:
            return TokenText(added.content, None if added.special else added.content.encode())
        piece = self._tokenizer.backend_tokenizer.id_to_token(token)
        if piece is None:  # models pad their vocabulary beyond that of the tokenizer
            return TokenText(f"token_id:{token}", None)
        raw = self._bytes(token, piece)
        return TokenText(raw.decode(errors="backslashreplace"), raw)

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
