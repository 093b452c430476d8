"""Request headers that replace fields of the body, for clients whose bodies cannot be changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, NamedTuple

from fastapi import Depends, Header
from pydantic import TypeAdapter, ValidationError

from deployments.activations.facts import check_session_id
from deployments.errors import RequestError
from deployments.job import Job
from deployments.points.capture import Capture, Tags

SESSION, TAGS = "X-Vitrine-Session", "X-Vitrine-Tags"
MOST_CHARACTERS = 1 << 15  # of the tags; the proxy accepts at most twice that for all headers

_TAGS: TypeAdapter[dict[str, str]] = TypeAdapter(Tags)


class Named(NamedTuple):
    """The headers' values.

    Attributes:
        session_id: The session of the runs, unless the body names one.
        tags: Tags of the runs, which those of the body override; None without the header.
    """

    session_id: str | None
    tags: dict[str, str] | None

    def tagged(self, job: Job) -> Job:
        """Add the tags to a job's captures."""
        if not self.tags:
            return job
        captures = (job.capture, job.default_capture)
        capture, default = (one and self._tagged(one) for one in captures)
        return replace(job, capture=capture, default_capture=default)

    def _tagged(self, capture: Capture) -> Capture:
        own, ours = capture.tags, self.tags or {}
        tags = [ours | one for one in own] if isinstance(own, list) else ours | own
        return capture.model_copy(update={"tags": tags})


async def _named(
    session: Annotated[str | None, Header(alias=SESSION, max_length=256)] = None,
    tags: Annotated[str | None, Header(alias=TAGS, max_length=MOST_CHARACTERS)] = None,
) -> Named:
    try:
        session_id = None if session is None else check_session_id(session)
    except ValueError as error:
        raise RequestError(str(error), SESSION) from None
    try:
        return Named(session_id, None if tags is None else _TAGS.validate_json(tags))
    except ValidationError as error:
        what = error.errors(include_url=False, include_input=False, include_context=False)[0]["msg"]
        raise RequestError(f"not a JSON object of strings: {what}", TAGS) from None


ByHeaders = Annotated[Named, Depends(_named)]
