"""The metrics of a request."""

from __future__ import annotations

import pytest

from deployments.job import Job
from deployments.messages import End, Piece, Refusal
from deployments.replica.metrics import RequestMeter


def end(index: int, prompt_tokens: int = 7) -> End:
    return End(Piece(index), "stop", prompt_tokens, 3)


def test_prompt_tokens_count_once_for_all_choices_of_a_prompt():
    meter = RequestMeter(Job("job", prompts=["a", "b"], n=2))
    meter.last([end(3, 5), end(0), end(1)])
    assert meter.status == 499  # should its client go now
    meter.last([end(2, 5)])
    assert (meter.status, meter.prompt_tokens) == (200, 12)


@pytest.mark.parametrize("status", [429, 500, 504])
def test_a_refusal_is_how_a_request_ended_whatever_came_before(status):
    meter = RequestMeter(Job("job", messages=[], n=2))
    meter.last([end(0), Refusal("no", status=status)])
    assert meter.status == status
