"""The ingress's message to a replica: a request to generate, or a text to tokenize."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from deployments.accounts import OPERATOR, Account
from deployments.activations.facts import SessionName
from deployments.conditions import Condition
from deployments.engine.request import Sampling
from deployments.errors import RequestError
from deployments.messages import Refusal
from deployments.points.capture import Capture
from deployments.points.interventions import Intervention
from deployments.points.logit_lens import LogitLens
from deployments.readouts.spec import AskedReadout

Ending = Literal["answer", "message", "turn"]  # of a prompt: where an answer begins, in the last message, or after it
_INTERVENTION = re.compile(r"interventions\[(\d+)\]")


@dataclass(frozen=True)
class Job:
    """One HTTP request, validated.

    Attributes:
        id: A unique id; the runs it makes are named after it.
        account: Who sends it.
        messages: A chat, in OpenAI's form; None for a completion.
        prompts: A completion's prompts, each text or token ids; empty for a chat.
        tools: OpenAI's tool definitions that the model may call.
        must_call: Names of functions of which the model must call one; empty if it need not call any.
        parallel_calls: Whether the model may make several calls.
        schema: JSON schema that the text obeys; None for any text.
        tool_call_format: The form of calls where the chat template shows none; None for no calls there.
        template_kwargs: Further variables for the chat template.
        ending: Where a chat's prompt ends.
        n: Choices per prompt.
        max_tokens: The most new tokens; None for the rest of the context.
        sampling: How tokens are drawn.
        stop: Strings that end a text.
        stop_token_ids: Token ids that end a text.
        ignore_eos: Continue after the model's end tokens.
        logprobs: Return each token's logprob, and those of this many top tokens; None for neither.
        echo: Begin each text with its prompt, and its logprobs with the prompt's, if they are requested.
        ranked: Return with each choice its mean logprob, by which the best are chosen.
        token_ids: Return the token ids of prompt and answer.
        capture: What to record; None for nothing.
        interventions: Changes of activations; the first ones are the preset's.
        variants: Further changes in each choice, `n` of them; empty if all choices have the same.
        logit_lens: The layers and tokens to return with each token; None for none.
        readouts: Readouts whose values are returned.
        stop_when: The condition on them that ends an answer; None for none.
        report: Whether to return what each intervention did.
        preset: The preset that is used; None for none.
        preset_fields: Names of the request's fields that are the preset's, besides `interventions`.
        preset_interventions: How many of the interventions are the preset's.
        preset_account: Whose tensors, runs and readouts the preset names: an admin's, if it is a default.
        session_id: The id of the session that the runs join.
        run_ids: Names of the runs, one for each choice; empty if they are named after the job.
        attempt: The number of replicas that may have begun the job and ended before they answered.
        request_id: The request's id for the client and the HTTP log; not unique.
        created: The time of the request, in Unix seconds.
        fields: For fields that an error may name, the request's own names, if they differ.
    """

    id: str
    account: Account = OPERATOR
    messages: list[dict[str, Any]] | None = None
    prompts: list[str | Sequence[int]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    must_call: tuple[str, ...] = ()
    parallel_calls: bool = True
    schema: dict[str, Any] | None = None
    tool_call_format: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    ending: Ending = "answer"
    n: int = 1
    max_tokens: int | None = None
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    echo: bool = False
    ranked: bool = False
    token_ids: bool = False
    capture: Capture | None = None
    interventions: tuple[Intervention, ...] = ()
    variants: tuple[tuple[Intervention, ...], ...] = ()
    logit_lens: LogitLens | None = None
    readouts: tuple[AskedReadout, ...] = ()
    stop_when: Condition | None = None
    report: bool = False
    preset: str | None = None
    preset_fields: frozenset[str] = frozenset()
    preset_interventions: int = 0
    preset_account: Account = OPERATOR
    session_id: str = ""
    run_ids: tuple[str, ...] = ()
    attempt: int = 0
    request_id: str = ""
    created: float = field(default_factory=time.time)
    fields: dict[str, str] = field(default_factory=dict)

    @property
    def session(self) -> SessionName:
        """The session that its runs join, one of the sender's."""
        return SessionName(self.account.owner, self.session_id)

    @property
    def may_store(self) -> bool:
        """Whether it may store its recorded rows."""
        return self.capture is not None and self.capture.destination != "inline"

    @property
    def choices(self) -> int:
        """The number of its choices."""
        return max(1, len(self.prompts)) * self.n

    def run_id(self, index: int) -> str:
        """The name of a choice's run; each attempt has names of its own, so that their parts are never mixed."""
        if self.run_ids:
            return self.run_ids[index]
        return f"run-{self.id}-{index}" + (f"-{self.attempt}" if self.attempt else "")

    def changes(self, number: int) -> dict[str, Intervention]:
        """The interventions of one of a prompt's choices, by the request's fields."""
        return _fields("interventions", self.interventions) | (
            _fields(f"variants[{number}]", self.variants[number]) if self.variants else {}
        )

    @property
    def all_changes(self) -> dict[str, Intervention]:
        """The interventions of any of its choices, by the request's fields."""
        changes = _fields("interventions", self.interventions)
        for number, variant in enumerate(self.variants):
            changes |= _fields(f"variants[{number}]", variant)
        return changes

    @property
    def conditions(self) -> dict[str, Condition]:
        """Conditions on readouts, by the request's fields."""
        by_field = {f"{field}.when": spec.when for field, spec in self.all_changes.items() if spec.when is not None}
        return by_field | ({} if self.stop_when is None else {"stop_when": self.stop_when})

    def reader(self, field: str) -> Account:
        """The account whose tensors, runs and readouts this field names."""
        return self.preset_account if self._is_of_preset(field) else self.account

    def _is_of_preset(self, field: str) -> bool:
        listed = _INTERVENTION.match(field)
        if listed:
            return int(listed[1]) < self.preset_interventions
        return re.split(r"[.\[]", field, maxsplit=1)[0] in self.preset_fields

    def refusal(self, error: RequestError) -> Refusal:
        """The refusal of this job for an error, with the request's own field names."""
        message, name = error.message, self.fields.get(error.field or "", error.field)
        if name and self._is_of_preset(name):
            message, name = f"the preset {self.preset!r}, {name}: {message}", "preset"
        elif name and (listed := _INTERVENTION.match(name)):
            name = f"interventions[{int(listed[1]) - self.preset_interventions}]{name[listed.end() :]}"
        return Refusal(message, name, error.code, error.status)


def _fields(name: str, specs: Sequence[Intervention]) -> dict[str, Intervention]:
    return {f"{name}[{i}]": spec for i, spec in enumerate(specs)}


@dataclass(frozen=True)
class Text:
    """A text to tokenize: a prompt, or a chat with the model's template.

    Attributes:
        prompt: The prompt; None for a chat.
        messages: The chat, in OpenAI's form.
        tools: OpenAI's tool definitions that the template shows.
        tool_call_format: The form of calls where the template shows none.
        template_kwargs: Further variables for the template.
        add_special_tokens: Let the tokenizer add those with which it begins or ends a text.
        ending: Where a chat ends.
        strings: Give each token as its vocabulary writes it, too.
    """

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_call_format: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = True
    ending: Ending = "answer"
    strings: bool = False
