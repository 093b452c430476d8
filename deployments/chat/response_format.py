"""Compiles the requested format of an answer to a grammar."""

from __future__ import annotations

from deployments.chat.grammar import arguments, schema_rule
from deployments.chat.template import ChatFormat
from deployments.engine.decoding.guided import Grammar, GrammarCompiler
from deployments.errors import RequestError
from deployments.job import Job
from deployments.model.model import Model


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
        source = self._chat.source(
            prompt if job.messages is not None else None,
            job.schema,
            job.tools or [],
            job.must_call,
            job.parallel_calls,
        )
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
