"""Messages with readout values and edit reports, and the limit on their size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from deployments.engine.request import ReadoutRows, Request
from deployments.errors import RequestError
from deployments.messages import EditReport, ReadoutValues

if TYPE_CHECKING:  # Serve's controller and proxies import this module without torch
    from deployments.engine.edits import Edit


def values_of(request: Request, rows: Sequence[ReadoutRows]) -> Iterator[ReadoutValues]:
    """Convert rows to messages: first those of the prompt's tokens, then those of generated ones."""
    prompt = len(request.prompt)
    for part in rows:
        source = request.readouts[part.index].source
        labels = source.readout.spec.labels
        for generated in (False, True):
            at = [i for i, position in enumerate(part.positions) if (position >= prompt) == generated]
            if at:
                index = [part.positions[i] - (prompt if generated else 0) for i in at]
                values = [part.values[i] for i in at]
                features = None if part.features is None else [part.features[i] for i in at]
                yield ReadoutValues(source.name, tuple(labels) if labels else None, generated, index, values, features)


def edit_reports(edits: Sequence[Edit]) -> Iterator[EditReport]:
    """The reports of edits that have a gate or a report."""
    for edit in edits:
        lag = edit.gate.lag if edit.gate else None
        if edit.report:
            yield EditReport(edit.field, edit.point.name, lag, *edit.report.changed)
        elif edit.gate:
            yield EditReport(edit.field, edit.point.name, lag)


def check_size(requests: Sequence[Request], limit: int) -> None:
    """Reject requests whose answer could have more numbers than the operator's limit.

    Raises:
        RequestError: It could have more.
    """
    count = 0
    for request in requests:
        most = len(request.prompt) + request.max_tokens
        for one in request.readouts:
            count += len(one.tokens.of(most)) * one.width * (2 if one.top_k else 1)
    if count > limit:
        message = (
            f"up to {count} numbers would be returned; the limit is {limit}: choose fewer tokens, or set max_tokens"
        )
        raise RequestError(message, "readouts", "readouts_too_large")
