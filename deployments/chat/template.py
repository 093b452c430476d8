"""One model's chat format: renders messages with its template, and parses and constrains its answers."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from deployments.chat import hermes, response_templates, roles, tool_calls
from deployments.chat.grammar import GrammarWriter, Reasoning, RequiredCalls, arguments, schema_rule
from deployments.chat.reader import AnswerReader
from deployments.engine.decoding.guided import Grammar, GrammarCompiler
from deployments.errors import RequestError
from deployments.job import Ending, Job
from deployments.model.model import Model

TEMPLATE_DEFAULTS = {  # default template variables; requests may add others
    "messages",
    "raise_exception",
    "strftime_now",
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *inspect.signature(render_jinja_template).parameters,
}
# A template is the model's own program and can raise any error.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, KeyError, RecursionError)
PROBE = "probe"  # a text that no template has of its own
TESTS_NONE = re.compile(r"""\bcontent\b['"\])]*\s+is\s+(not\s+)?none\b""")  # in a chat template
REMEDY = 'set tool_call_format to "hermes" to describe the tools in a system message and read calls in <tool_call> tags'


class ChatFormat:
    """One model's chat format: messages to a prompt, and an answer's text to a message.

    Args:
        tokenizer: The Hugging Face tokenizer, with the chat template.
        hf: The Hugging Face model; its name helps to recognize the format.
        in_hermes: Write and read tool calls in Hermes' form.
    """

    def __init__(self, tokenizer: Any, hf: Any, in_hermes: bool = False) -> None:
        self._tokenizer, self._hf, self._in_hermes = tokenizer, hf, in_hermes
        known = response_templates.response_template(tokenizer, hf)
        self._template = known = response_templates.with_hermes(known) if in_hermes else known
        self._shows_calls = known is not None and "tool_calls" in known.fields
        self._markers = {
            tools: response_templates.markers(known, tokenizer, tools) if known else {} for tools in (False, True)
        }

    def calling(self, form: str | None) -> ChatFormat:
        """This format, or one with this form of calls (`hermes`) if the model's template shows none."""
        return self if form is None or self._shows_calls else self._hermes

    @functools.cached_property
    def _hermes(self) -> ChatFormat:
        return ChatFormat(self._tokenizer, self._hf, in_hermes=True)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        more: Mapping[str, Any] | None = None,
        ending: Ending = "answer",
    ) -> str:
        """Render a chat to a prompt.

        Args:
            messages: In OpenAI's form.
            tools: OpenAI's definitions.
            more: Further variables for the template.
            ending: Where the prompt ends.

        Raises:
            RequestError: The model has no chat template, the template rejects these messages, or `more` has a variable
                that a request may not set.
        """
        if not self._tokenizer.chat_template:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        taken = TEMPLATE_DEFAULTS | set(self._tokenizer.special_tokens_map)
        if known := taken.intersection(more or ()):
            name = min(known)
            message = f"{name!r} is set by the server or by another field of the request: leave it out"
            raise RequestError(message, f"chat_template_kwargs.{name}")
        try:
            text = self._rendered(messages, tools, **(more or {}), **_ends(ending))
            text.encode()  # arguments of earlier calls are JSON within JSON, which can contain half of a surrogate pair
            return text
        except TEMPLATE_ERRORS as error:
            reason = str(error).partition("Final message to continue")[0]  # the whole chat follows
            raise RequestError(f"the model's chat template rejects these messages: {reason}", "messages") from error

    def spans(
        self,
        text: str,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        more: Mapping[str, Any] | None = None,
        ending: Ending = "answer",
    ) -> list[roles.Span] | None:
        """Where the messages are in `text`, which `render` made of them; see `roles.spans`."""

        def render(told: Sequence[dict[str, Any]], ending: Ending = ending) -> str:
            with contextlib.suppress(*TEMPLATE_ERRORS, IndexError):  # there may be no message
                return self._rendered(told, tools, True, **(more or {}), **_ends(ending))
            return ""

        return roles.spans(messages, text, render, *self._marks_and_ends)

    @functools.cached_property
    def _marks_and_ends(self) -> tuple[roles.Marks, Sequence[str]]:
        """Texts before and after reasoning, and special tokens that may end a message."""
        shown = str(self._tokenizer.chat_template)
        pairs = [pair for pair in response_templates.REASONING_MARKS if pair[1] in shown]
        if self._template and (name := response_templates.reasoning(self._template)):
            field = self._template.fields[name]
            pairs += zip(field.open_literals or (), field.close_literals or (), strict=False)
        ids = getattr(self._hf.generation_config, "eos_token_id", None) or []
        ends = self._tokenizer.convert_ids_to_tokens([ids] if isinstance(ids, int) else ids)
        return pairs, [*filter(None, {*ends, self._tokenizer.eos_token})]

    def _rendered(self, messages: Sequence[dict[str, Any]], tools: Any, marked: bool = False, **more: Any) -> str:
        if self._in_hermes:
            messages, tools = hermes.plain(messages, tools, self._takes_system), None
        template = self._tokenizer.get_chat_template(None, tools)
        template = roles.with_marks(template) if marked else template
        # `apply_chat_template` leaves out content that is None, for which some templates test (DeepSeek's).
        empty = None if TESTS_NONE.search(template) else ""
        told = [_with_parsed_arguments(message, empty) for message in messages]
        if self._needs_parts:
            told = [
                {**message, "content": [{"type": "text", "text": message["content"]}]}
                if isinstance(message.get("content"), str)
                else message
                for message in told
            ]
        variables = {**self._tokenizer.special_tokens_map, "tools": tools, "chat_template": template, **more}
        rendered: Any = render_jinja_template([told], **variables)  # texts, and where generation began in each
        return str(rendered[0][0])

    @functools.cached_property
    def _takes_system(self) -> bool:
        """Whether the template shows a system message; some raise an error instead (Gemma 2's), or leave it out."""
        return self._shows({"role": "system", "content": PROBE}, {"role": "user", "content": "a"})

    @functools.cached_property
    def _needs_parts(self) -> bool:
        """Whether the template shows texts in lists of parts only; most such templates leave a string out silently."""
        parts = [{"type": "text", "text": PROBE}]
        return not self._shows({"role": "user", "content": PROBE}) and self._shows({"role": "user", "content": parts})

    def _shows(self, *messages: dict[str, Any]) -> bool:
        """Whether the template shows `PROBE`, a text of these messages."""
        with contextlib.suppress(*TEMPLATE_ERRORS):
            return PROBE in str(self._tokenizer.apply_chat_template([*messages], tokenize=False))
        return False

    def tokenize(self, prompt: str) -> Encoding:
        """The tokens of a rendered prompt, which already contains its special tokens."""
        encoding: Encoding = self._tokenizer(prompt, add_special_tokens=False).encodings[0]
        return encoding

    def is_reasoning(self, prompt: str, text_of: Callable[[int], str]) -> Callable[[int], bool] | None:
        """Reads the tokens of an answer to `prompt`, and tells which are reasoning; None if answers have none.

        A token is reasoning if it is within reasoning, or ends a mark of it. Of an opening mark of several tokens, only
        the last is, because those before it may still become something else.
        """
        if (reader := self.reader(prompt, None)) is None:
            return None

        def is_reasoning(token: int) -> bool:
            before = reader.reasons
            reader.add(text_of(token))
            return before or reader.reasons

        return is_reasoning

    def reader(
        self, prompt: str, tools: Sequence[dict[str, Any]] | None, parallel: bool = True, streamed: bool = False
    ) -> AnswerReader | None:
        """A parser of reasoning and tool calls in an answer to `prompt`; None if it can have neither.

        Raises:
            RequestError: This model's format of tool calls is not known.
        """
        template = self._template
        if tools and not self._shows_calls:
            message = f"the chat template does not show how this model writes tool calls: {REMEDY}"
            raise RequestError(message, "tools")
        if template is None or not (tools or response_templates.reasoning(template)):
            return None
        return AnswerReader(template, prompt, tools or (), parallel, streamed)

    def markers(self, tools: Sequence[dict[str, Any]] | None) -> Mapping[int, str]:
        """The special tokens that must appear in the text of an answer with these tools: id -> text."""
        return self._markers[bool(tools)]

    def grammar_source(self, job: Job, prompt: str) -> str:
        """The grammar of the answers to one of a job's prompts, which may contain the start of the answer.

        Raises:
            RequestError: A call is required, and this model's format of calls is not known.
        """
        form = self._form if job.tools else None
        if job.must_call and form is None:
            message = "the chat template does not show how this model writes calls, so none can be required"
            raise RequestError(message if self._shows_calls else f"{message}: {REMEDY}", "tool_choice")
        functions = [tool["function"] for tool in job.tools or ()]
        if job.must_call:
            functions = [function for function in functions if function["name"] in job.must_call]
        calls = RequiredCalls(form, functions, job.parallel_calls) if form else None
        reasoning = self._reasoning(prompt) if job.messages is not None else None
        return self._lark.answer(reasoning, None if job.must_call else job.schema, calls)

    @functools.cached_property
    def _form(self) -> tool_calls.ToolCallFormat | None:
        if self._in_hermes:
            return hermes.FORMAT
        if self._template is None or not self._tokenizer.chat_template:
            return None
        special = [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        return tool_calls.learn(self._rendered, self._template, special)

    @functools.cached_property
    def _lark(self) -> GrammarWriter:
        return GrammarWriter({token.content: id for id, token in self._tokenizer.added_tokens_decoder.items()})

    def _reasoning(self, prompt: str) -> Reasoning | None:
        """The format of reasoning in an answer to `prompt`; None if it has none, or if the prompt has ended it."""
        name = response_templates.reasoning(self._template) if self._template else None
        if self._template is None or name is None:
            return None
        thinking = AnswerReader(self._template, prompt, ()).thinking
        field = self._template.fields[name]
        if thinking is False or not (field.open_literals and field.close_literals):
            return None
        if not thinking and field.close_literals[0] not in str(self._tokenizer.chat_template):
            return None  # this model's chat template has no reasoning; others with the same response template have
        return Reasoning(field.open_literals[0], field.close_literals[0], bool(thinking))


class ResponseFormats:
    """Compiles the formats that jobs request from one model."""

    def __init__(self, chat: ChatFormat, model: Model) -> None:
        self._chat = chat
        self._grammars = GrammarCompiler(model)

    def grammar(self, job: Job, prompt: str) -> Grammar | None:
        """The grammar of the answers to one of a job's prompts; None if any text is allowed.

        Args:
            job: The job.
            prompt: The text of a chat.

        Raises:
            RequestError: A schema is too large, invalid or not supported, or this model's tool call format is not
                known.
        """
        if job.schema is None and not job.must_call:
            return None
        source = self._chat.calling(job.tool_call_format).grammar_source(job, prompt)
        try:
            return self._grammars.compile(source, "tools" if job.must_call else "response_format")
        except RequestError:
            self._blame(job)
            raise

    def _blame(self, job: Job) -> None:
        """Raise the error of a single schema of a job, with its field."""
        schemas = [] if job.schema is None or job.must_call else [("response_format", job.schema)]
        for i, tool in enumerate(job.tools or ()):
            function = tool["function"]
            if not job.must_call or function["name"] in job.must_call:
                schemas.append((f"tools[{i}].function.parameters", arguments(function)))
        for field, schema in schemas:
            self._grammars.compile(f"start: {schema_rule(schema)}", field)


def _ends(ending: Ending) -> dict[str, bool]:
    return {"add_generation_prompt": ending == "answer", "continue_final_message": ending == "message"}


def _with_parsed_arguments(message: dict[str, Any], empty: str | None) -> dict[str, Any]:
    """Parse the arguments of earlier calls: OpenAI's clients send JSON text, and templates expect an object.

    Beside calls, content without a text is `empty`.
    """
    parsed = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        if isinstance(given := function["arguments"], str):
            with contextlib.suppress(ValueError):  # keep other text as the model wrote it
                value = json.loads(given) if given.strip() else None  # some clients send no text for no arguments
                function["arguments"] = value if isinstance(value, dict) else {} if value is None else given
        parsed.append({**call, "function": function})
    return {**message, "content": message.get("content") or empty, "tool_calls": parsed} if parsed else message
