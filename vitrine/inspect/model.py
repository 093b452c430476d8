"""The model provider: inspect_ai's client for OpenAI-compatible servers, with Vitrine's fields in requests and logs.

All imports of inspect_ai's private modules are here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from inspect_ai._control.eval_state import stable_task_id_for_eval
from inspect_ai.log._samples import sample_active
from inspect_ai.model import ChatMessage, GenerateConfig, ModelCall, ModelOutput
from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI
from inspect_ai.tool import ToolChoice, ToolInfo

URL = "http://127.0.0.1:8000/v1"
NO_KEY = "unused"  # OpenAI's client requires a key; a server without keys accepts any
MOST_ID = 256  # the server's limit for a sample's id and for a tag


class VitrineAPI(OpenAICompatibleAPI):
    """A model of a Vitrine server.

    Each output's `metadata` has the requested ones of `session_id`, `run_ids`, `status` (`stored` or `failed`),
    `activations_meta` from the server, and `readouts`, a list with an entry for each choice.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 - inspect_ai's own default, which is not changed
        capture: Mapping[str, Any] | bool | None = None,
        readouts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
        interventions: Sequence[Mapping[str, Any]] | None = None,
        preset: str | None = None,
        session_id: str | None = None,
        stream: bool | None = None,
        **model_args: Any,
    ) -> None:
        """Initialize the model; the first request connects.

        Args:
            model_name: The served model's id.
            base_url: The server's URL, ending in `/v1`; by default `VITRINE_BASE_URL`, else port 8000 of this machine.
            api_key: The key; by default `VITRINE_API_KEY`, else `OPENAI_API_KEY`. A server without keys needs none.
            config: inspect_ai's generation options.
            capture: The request field `capture`; True records what the server records by default.
            readouts: The request field `readouts`, or one of its entries.
            interventions: The request field `interventions`.
            preset: The name of a stored preset.
            session_id: The session of the runs; by default `inspect-` and the log's `task_id`, which retries keep.
            stream: inspect_ai's option; not with `capture` or `readouts`, whose results its client drops from a stream.
            model_args: Further arguments of inspect_ai's provider `openai-api`.

        Raises:
            ValueError: `stream` with `capture` or `readouts`, or a `capture` that is not an object.
        """
        if capture is not None and not isinstance(capture, bool | Mapping):
            raise ValueError(f"capture is {capture!r}, not true or an object such as {{'layers': [8], 'sites': [...]}}")
        steered = {"interventions": interventions, "preset": preset}
        self._fields: dict[str, Any] = {name: value for name, value in steered.items() if value is not None}
        if readouts:
            self._fields["readouts"] = [readouts] if isinstance(readouts, str | Mapping) else list(readouts)
        self._capture = {} if capture is True else dict(capture) if capture else None
        self._session_id = session_id
        if stream and self._has_results:
            raise ValueError("stream: not with capture or readouts")
        super().__init__(
            model_name=model_name,
            base_url=base_url,
            api_key=api_key or os.environ.get("VITRINE_API_KEY") or os.environ.get("OPENAI_API_KEY") or NO_KEY,
            config=config,
            service="vitrine",
            service_base_url=URL,
            stream=stream,
            **model_args,
        )

    @property
    def _has_results(self) -> bool:
        """Whether answers have fields besides OpenAI's."""
        return self._capture is not None or "readouts" in self._fields

    def auto_streamable(self, config: GenerateConfig) -> bool:
        """Whether a callback may turn on streaming."""
        return not self._has_results and bool(super().auto_streamable(config))

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput | tuple[ModelOutput | Exception, ModelCall]:
        """Generate one answer; arguments and errors are those of inspect_ai's provider."""
        extra = self._fields | self._recorded(len(input)) | (config.extra_body or {})
        answer = await super().generate(input, tools, tool_choice, config.model_copy(update={"extra_body": extra}))
        output, call = answer
        if self._has_results and isinstance(output, ModelOutput) and call.response and not call.error:
            output.metadata = (output.metadata or {}) | results(call.response)
        return output, call

    def _recorded(self, messages: int) -> dict[str, Any]:
        """The request's fields for recording, and for the call's place in the evaluation.

        Args:
            messages: The number of messages before the answer, which is the answer's index.
        """
        active = sample_active()
        session = self._session_id or (f"inspect-{stable_task_id_for_eval(active.eval_id)}" if active else None)
        fields: dict[str, Any] = {"session_id": session} if session and self._has_results else {}
        if self._capture is None:
            return fields
        capture = {"store_text": True, **self._capture}
        if active:
            sample = str(active.sample.id)[:MOST_ID]
            its = {"task": active.task[:MOST_ID], "sample": sample, "epoch": str(active.epoch)}
            capture["tags"] = its | {"message": str(messages)} | capture.get("tags", {})
            capture.setdefault("sample_id", sample)
        return fields | {"store_activations": True, "capture": capture}


def results(answer: Mapping[str, Any]) -> dict[str, Any]:
    """An answer's fields besides OpenAI's, in the format of logs.

    Args:
        answer: The body of a chat completion.
    """
    fields: dict[str, Any] = {}
    if meta := answer.get("activations_meta"):
        fields = {"session_id": meta.get("session_id"), "status": meta.get("status"), "activations_meta": meta}
        fields["run_ids"] = [run.get("run_id") for run in meta.get("runs", ())]
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    if any("readouts" in choice for choice in choices):
        fields["readouts"] = [choice.get("readouts") for choice in choices]
    return fields
