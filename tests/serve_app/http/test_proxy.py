"""What Serve's proxy answers when the ingress ends. The faults of tests/chaos end a real one."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from ray.serve._private.http_util import validate_http_proxy_callback_return
from ray.serve._private.utils import call_function_from_import_path

from serve_app import RAY_ENVIRONMENT


@pytest.fixture(scope="module")
def middlewares():
    return validate_http_proxy_callback_return(
        call_function_from_import_path(RAY_ENVIRONMENT["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"])
    )


def test_a_request_that_nobody_answers_may_be_tried_again(middlewares):
    async def silent(scope, receive, send):
        pass  # as the proxy after the ingress has ended

    for middleware in middlewares:
        silent = middleware.cls(silent, *middleware.args, **middleware.kwargs)
    answer = TestClient(silent).get("/v1/models")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert answer.json()["error"]["code"] == "unavailable"


def test_answers_and_failures_pass(middlewares):
    api = FastAPI(middleware=middlewares)
    api.get("/fine")(lambda: "yes")
    with TestClient(api) as client:
        assert client.get("/fine").json() == "yes"
        assert client.get("/else").status_code == 404
