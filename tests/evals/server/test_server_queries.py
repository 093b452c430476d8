"""A check that decides nothing is not silent."""

import pytest

from evals.server.server_queries import refused


def test_a_check_without_an_answer_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    url = "http://127.0.0.1:1/v1/chat/completions"  # a port at which nothing listens
    assert refused(url, {}) == {}
    (warned,) = caplog.messages
    assert warned.startswith(f"an option could not be checked before the first sample: {url}: ")
