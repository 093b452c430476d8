"""A request whose replica ends before it says anything goes to another one, once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from deployments.job import Job
from deployments.messages import ENGINE_ENDED, NOT_TAKEN, End, Piece, Refusal
from deployments.points.capture import Capture
from serve_app.backend import served_model

ANSWER = [End(Piece(0), "stop", 1, 1)]
ENDED = [Refusal(ENGINE_ENDED, None, "unavailable", 503)]
REFUSED = [Refusal(NOT_TAKEN, None, "unavailable", 503)]
PLAIN = Job("a", prompts=["b"])
RECORDING = Job("a", prompts=["b"], capture=Capture())
STORED = Job("a", prompts=["b"], session_id="stored", capture=Capture())


def rpc_error(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "said")


LOST, TOO_LARGE = rpc_error(grpc.StatusCode.UNAVAILABLE), rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.mark.parametrize(
    ("job", "said", "want", "asked"),
    [
        (PLAIN, [ANSWER], ANSWER, 1),
        (PLAIN, [ENDED, ANSWER], ANSWER, 2),
        (PLAIN, [ENDED, REFUSED, REFUSED, ANSWER], ANSWER, 4),  # as long as it comes to the process that ends
        (PLAIN, [ENDED, ENDED, ANSWER], ENDED, 2),  # the request itself may be what ends engines
        (PLAIN, [LOST, ANSWER], ANSWER, 2),
        (PLAIN, [LOST, LOST, ANSWER], LOST, 2),
        (PLAIN, [TOO_LARGE, ANSWER], TOO_LARGE, 1),
        (RECORDING, [REFUSED, ANSWER], ANSWER, 2),
        (RECORDING, [ENDED, ANSWER], ANSWER, 2),
        (RECORDING, [LOST, ANSWER], ANSWER, 2),
        (RECORDING, [LOST, REFUSED, ANSWER], ANSWER, 3),
        (RECORDING, [REFUSED, LOST, LOST, ANSWER], LOST, 3),
        (STORED, [REFUSED, ENDED, ANSWER], ENDED, 2),
        (STORED, [LOST, ANSWER], LOST, 1),
    ],
)
def test_a_request_is_asked_again_once_where_a_replica_may_have_begun_it(
    job: Job, said: list[Any], want: Any, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_model, "AGAIN_S", 0.0)
    answers, asked_with = iter(said), list[Job]()

    async def ask(job: Job) -> Any:
        asked_with.append(job)
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    async def restarted(job: Job) -> Job | None:
        return None if job.session_id == "stored" else replace(job, attempt=1)

    if isinstance(want, Exception):
        with pytest.raises(grpc.aio.AioRpcError):
            asyncio.run(served_model._asked(job, ask, restarted))
    else:
        assert asyncio.run(served_model._asked(job, ask, restarted)) == want
    first_end = next((i for i, answer in enumerate(said) if answer is not REFUSED), 0)
    again = [job.attempt == 1 for job in asked_with]
    assert again == [i > first_end for i in range(asked)]  # each replica after one that may have begun it
