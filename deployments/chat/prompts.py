"""Prompts as text and tokens, for jobs and `/tokenize`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers import Encoding

from deployments.chat import roles
from deployments.chat.template import ChatFormat
from deployments.chat.token_texts import TextOffsets, TokenTexts
from deployments.errors import RequestError, naming
from deployments.job import Job, Text
from deployments.model.model import Model
from deployments.points.placement import AnswerReasoning, Turns

LINE = "\n"  # what precedes a text that is tokenized as a part; few tokens join a line's end to what follows


class Echo(NamedTuple):
    """A prompt as repeated in an answer.

    Attributes:
        text: The prompt.
        offsets: The number of characters before each of its tokens.
    """

    text: str
    offsets: Sequence[int]


class Prompt(NamedTuple):
    """One prompt of a job.

    Attributes:
        ids: Its token ids.
        text: The text that was tokenized; None if the client sent token ids.
        encoding: The tokens of a chat.
    """

    ids: list[int]
    text: str | None = None
    encoding: Encoding | None = None


class Prompts:
    """Tokenizes and detokenizes prompts of one model. All of it takes time: call it outside the event loop."""

    def __init__(self, model: Model, chat: ChatFormat, token_texts: TokenTexts) -> None:
        self._model = model
        self._tokenizer = model.tokenizer
        self._chat = chat
        self._token_texts = token_texts

    def of(self, job: Job) -> list[Prompt]:
        """A job's prompts.

        Raises:
            RequestError: One is too long, or the model's template rejects the chat.
        """
        if job.messages is not None:
            text = self._rendered(job)
            self._check_length(text, "prompt")
            encoding = self._chat.tokenize(text)
            return [Prompt(encoding.ids, text, encoding)]
        prompts = []
        for number, prompt in enumerate(job.prompts):
            with naming(number, len(job.prompts)):
                if isinstance(prompt, str):
                    self._check_length(prompt, "prompt")
                    prompts.append(Prompt(self._ids(prompt, add_special_tokens=True), prompt))
                else:
                    prompts.append(Prompt(list(prompt)))
        return prompts

    def echo(self, prompt: Prompt) -> Echo:
        """The prompt as an answer repeats it: as sent or, for token ids, decoded."""
        offsets = TextOffsets(self._token_texts)
        offsets.add(prompt.ids)
        joined = offsets.close()
        text = self._decoded(prompt.ids) if prompt.text is None else prompt.text
        # Text that the tokenizer puts before a prompt (an opening token, a space) is not part of it.
        before = len(joined) - len(text) if joined.endswith(text) else 0
        return Echo(text, [min(max(0, end - before), len(text)) for end in offsets.ends[:-1]])

    def offsets(self, prompt: Prompt) -> tuple[str, Sequence[int]]:
        """A prompt's text with special tokens, and the number of characters before each token and after the last."""
        offsets = TextOffsets(self._token_texts)
        offsets.add(prompt.ids)
        return offsets.close(), offsets.ends

    def turns(self, job: Job, prompt: Prompt, generates: bool) -> Turns | None:
        """The messages of a chat in its prompt; None if they are not known."""
        assert job.messages is not None
        assert prompt.text is not None
        assert prompt.encoding is not None
        form = self._chat.calling(job.tool_call_format)
        found = form.spans(prompt.text, job.messages, job.tools, job.template_kwargs, job.ending)
        if found is None:
            return None
        return roles.turns(job.messages, found, prompt.encoding.offsets, generates and job.ending != "message")

    def reasoning(self, job: Job, prompt: Prompt) -> AnswerReasoning | None:
        """Follows the reasoning of an answer; None if the model's answers have none."""
        markers = self._chat.markers(None)

        def text_of(token: int) -> str:
            return markers.get(token) or (self._token_texts.of(token).raw or b"").decode(errors="ignore")

        found = self._chat.is_reasoning("" if job.ending == "turn" else prompt.text or "", text_of)
        return AnswerReasoning(found, len(prompt.ids)) if found else None

    # ---- tokenizing without a request

    def tokenize(self, text: Text) -> dict[str, Any]:
        """The tokens of a text, in the form of the answer of `/tokenize`.

        Raises:
            RequestError: It is too long, or the model's template rejects the chat.
        """
        if text.messages is not None:
            written, field = self._rendered(text), "messages"
        else:
            assert text.prompt is not None
            written, field = text.prompt, "prompt"
        self._check_length(written, field)
        ids = self._ids(written, text.add_special_tokens)
        return {
            "count": len(ids),
            "max_model_len": self._model.context,
            "tokens": ids,
            "token_strs": self._tokenizer.convert_ids_to_tokens(ids) if text.strings else None,
            "token_texts": [self._token_texts.of(token).text for token in ids] if text.strings else None,
        }

    def detokenize(self, tokens: Sequence[int], strings: bool = False) -> dict[str, Any]:
        """The text of tokens, in the form of the answer of `/detokenize`; with `strings`, also each token's own text.

        Raises:
            RequestError: One is not a token id, or they are more than the context has.
        """
        if len(tokens) > self._model.context:
            message = f"{len(tokens)} tokens, but the context has {self._model.context}"
            raise RequestError(message, "tokens", "context_length_exceeded")
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._model.vocabulary):
            raise RequestError(f"token ids go from 0 to {self._model.vocabulary - 1}", "tokens")
        texts = {"token_texts": [self._token_texts.of(token).text for token in tokens]} if strings else {}
        return {"prompt": self._decoded(list(tokens))} | texts

    def inner_ids(self, text: str) -> list[int]:
        """Tokenize a text as if another preceded it, since many tokenizers put a space before a text."""
        before, joined = (self._ids(whole, add_special_tokens=False) for whole in (LINE, LINE + text))
        if joined[: len(before)] != before:
            return self._ids(text, add_special_tokens=False)
        return joined[len(before) :]

    # ---- shared

    def _rendered(self, chat: Job | Text) -> str:
        form = self._chat.calling(chat.tool_call_format)
        return form.render(chat.messages or (), chat.tools, chat.template_kwargs, chat.ending)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def _check_length(self, text: str, field: str) -> None:
        """Reject a text before tokenizing it if it cannot fit even with the longest tokens."""
        most = self._model.context * self._model.longest_token
        if len(text) > most:
            message = (
                f"the text has {len(text)} characters, more than this model's context of {self._model.context} "
                "tokens can hold"
            )
            raise RequestError(message, field, "context_length_exceeded")
