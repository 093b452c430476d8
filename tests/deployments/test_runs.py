"""What a request is told of its activations when the store cannot take them."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import ActorUnavailableError

from deployments.activations.facts import StoreError
from deployments.activations.spec import Capture
from deployments.engine.request import GREEDY
from deployments.messages import End, Job, Refusal
from deployments.options import Options
from deployments.replica import ModelReplica

pytestmark = pytest.mark.usefixtures("cluster")  # rows go through the object store


class FailingStore:
    """Stands where the store's handle does: `store.write.remote(...)`."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.write = self

    async def remote(self, facts, batches):
        raise self.error


def run(error: Exception, **capture):
    replica = ModelReplica.func_or_class(Options(dtype="float32", threads=1), store=FailingStore(error))
    fields = {"capture": Capture(points=["norm.output"], **capture), "session_id": "s", "max_tokens": 4}
    try:
        return asyncio.run(replica.complete(Job(id="job", prompts=["Tom has 3."], sampling=GREEDY, **fields)))
    finally:
        replica.__del__()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StoreError("the disk is full: free some room"), "disk is full"),
        (ActorUnavailableError("the store", None), "the store"),
    ],
)
def test_an_answer_comes_without_its_activations_and_says_why(error, reason):
    messages = run(error)
    assert isinstance(messages[-1], End)
    assert messages[-1].completion_tokens > 0
    assert messages[-1].run.status == "failed"
    assert reason in messages[-1].run.reason


def test_a_request_that_requires_its_activations_fails_with_them():
    messages = run(StoreError("the disk is full: free some room"), required=True)
    assert isinstance(messages[-1], Refusal)
    assert (messages[-1].status, messages[-1].field) == (500, "capture")
    assert "disk is full" in messages[-1].message


def test_there_is_one_copy_of_the_weights():
    replica = ModelReplica.func_or_class(Options(dtype="float32", threads=1), store=object())
    hf, traced = replica._model.hf, replica._model.nnsight._module
    assert traced is hf
    assert hf.lm_head.weight.data_ptr() == hf.model.embed_tokens.weight.data_ptr()
    replica.__del__()
