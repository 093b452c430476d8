"""A server that speaks Vitrine's contract on a real port and answers sums.

The label in brackets in a question says how it answers:

    (none)       right, through the calculator where tools are offered
    [wrong]      a wrong number            [invalid]   no ####           [cut]    finish_reason length
    [busy]       429 with `retry_after` at first, then right             [flaky]  breaks the connection once
    [torn]       breaks the connection each time     [long]  400, max_tokens are too many
    [restart]    the proxy's 500 in plain text at first, then right          [broken]  500 with a reason
    [starting]   the proxy's 404 in plain text at first, then right
    [refused]    400                       [down]      503 until `up`     [loop]   calls tools for ever
    [zero]       divides by zero by the calculator, then right
    [full]       the calculator's result does not fit the context; nor does the question of [wide]
    [late]       504, the server's own time limit is over        [queued]   so at first, and it was never begun
    [unstored]   right, but its activations are not stored until `up`
    [silent]     right, and nothing said of activations
    [pending]    right, and its activations are neither stored nor failed
    [gather]     right, once `gather` such requests are here at the same time
    [wait]       right, once `release()` was called
    [uncounted]  right, without `usage`      [deadly]   kills the process that asks once, then right
"""

import asyncio
import json
import os
import re
import signal
import socket
import threading
from collections import Counter
from types import TracebackType
from typing import Any, Self

import psutil
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from tests.waiting import EACH_S, until

Body = dict[str, Any]
POINT = "layers.1.input_layernorm.output"


class Uvicorn(uvicorn.Server):
    """Ends at once where nothing is in flight; without this each of many tests waits for it for 0.2 s."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:
            await asyncio.sleep(EACH_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.server_state.tasks:
            await super().shutdown(sockets)
            return
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)  # in which they are closed


class FakeServer:
    """Runs in a thread; `requests` are the chat bodies in the order of their arrival."""

    def __init__(self, port: int = 0) -> None:
        self.requests: list[Body] = []
        self.gather = 1
        self.up = False
        self.refused: str | None = None  # what is 400 in a question
        self.models = ["fake/model"]
        self.told: Body = {}  # of each model, beside its id
        self.refuses: dict[str, str] = {}  # by a field that it refuses, the place in it
        self.closed: Response | None = None  # what it answers to who asks for models
        self.retry_after = "0"
        self.modern = False  # refuses max_tokens, as OpenAI's newer models do
        self.keys: set[str | None] = set()  # that requests send
        self.attempts: Counter[str] = Counter()  # by question
        self._loop = asyncio.new_event_loop()
        self._released = asyncio.Event()
        self._waiting = 0
        self._gathered = asyncio.Condition()
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = int(self._socket.getsockname()[1])
        self.base_url = f"http://127.0.0.1:{self.port}/v1"
        app = FastAPI()
        app.get("/health")(self._health)
        app.get("/v1/models")(self._models)
        app.post("/v1/chat/completions")(self._chat)
        config = uvicorn.Config(app, log_level="error", ws="none", timeout_graceful_shutdown=1)
        self._uvicorn = Uvicorn(config)
        self._thread = threading.Thread(target=self._serve)

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._uvicorn.server_state.connections)

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._released.set)

    def __enter__(self) -> Self:
        self._thread.start()
        until(lambda: self._uvicorn.started)  # else the first request would wait for it, however short its limit
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._uvicorn.should_exit = True
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        self._loop.run_until_complete(self._uvicorn.serve(sockets=[self._socket]))
        self._loop.close()

    async def _health(self, request: Request) -> Body:
        self.keys.add(request.headers.get("authorization"))
        return {"status": "ok"}

    async def _models(self) -> Response:
        entries = [{"id": model, "object": "model"} | self.told for model in self.models]
        return self.closed or JSONResponse({"object": "list", "data": entries})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.add(request.headers.get("authorization"))
        question = [message["content"] for message in body["messages"] if message["role"] == "user"][-1]
        label = (re.search(r"\[(\w+)\]", question) or [""])[0].strip("[]")
        self.attempts[question] += 1
        first = self.attempts[question] == 1
        if self.modern and "max_tokens" in body:
            message = "Unsupported parameter: 'max_tokens' is not supported with this model. Use another."
            return _error(400, message, param="max_tokens", code="unsupported_parameter")
        for field in self.refuses.keys() & body.keys():
            return _error(400, "not with this model", param=self.refuses[field])
        if label == "long":
            return _error(400, "max_tokens: too many", param="max_tokens", code="context_length_exceeded")
        if label == "refused" or (self.refused and self.refused in question):
            return _error(400, "prompt is not to my liking")
        told = any(message["role"] == "tool" for message in body["messages"])
        if label == "wide" or (label == "full" and told):
            param = "max_tokens" if told else "messages"
            return _error(400, "no more than 64 tokens", param=param, code="context_length_exceeded")
        if label == "late":
            return _error(504, "not done after the server's limit of 600 s", code="timeout")
        if label == "queued" and first:
            return _error(504, "not begun after the server's limit of 600 s", code="not_started")
        if label == "broken":
            return _error(500, "a fault of request 7")
        if label == "restart" and first:
            return PlainTextResponse("Internal Server Error", status_code=500)
        if label == "starting" and first:
            return PlainTextResponse("Path '/v1/chat/completions' not found.", status_code=404)
        if (label == "down" and not self.up) or (label == "busy" and first):
            return _error(503 if label == "down" else 429, "no room", {"Retry-After": self.retry_after})
        if label == "torn" or (label == "flaky" and first):
            return Response("{", headers={"Content-Length": "100"})  # the rest never comes
        if label == "deadly" and first:
            assert request.client
            asks = [one.pid for one in psutil.net_connections("tcp") if one.laddr and one.laddr == request.client]
            os.kill(asks[0], signal.SIGKILL)
        if label == "gather":
            await self._gather()
        if label == "wait":
            await self._released.wait()
        if label == "unstored" and self.up:
            label = ""
        return JSONResponse(_completion(body, label, question, len(self.requests)))

    async def _gather(self) -> None:
        async with self._gathered:
            self._waiting += 1
            batch = (self._waiting - 1) // self.gather + 1
            self._gathered.notify_all()
            await self._gathered.wait_for(lambda: self._waiting >= batch * self.gather)


def _error(
    status: int,
    message: str,
    headers: dict[str, str] | None = None,
    param: str | None = None,
    code: str | None = None,
) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return JSONResponse({"error": error}, status_code=status, headers=headers)


def _completion(body: Body, label: str, question: str, number: int) -> Body:
    numbers = re.search(r"What is (\d+) \+ (\d+)\?", question)
    assert numbers, question
    message: Body = {"role": "assistant", "content": None, "run_id": f"run-{number}"}
    finish = "length" if label == "cut" else "stop"
    results = [m["content"] for m in body["messages"] if m["role"] == "tool"]
    if body.get("tools") and (label == "loop" or not results):
        expression = "1 / 0" if label == "zero" else f"{numbers[1]} + {numbers[2]}"
        arguments = json.dumps({"expression": expression})
        call = {"name": "calculator", "arguments": arguments}
        message["tool_calls"] = [{"id": f"call-{number}", "type": "function", "function": call}]
        finish = "tool_calls"
    else:
        total = results[-1] if results and label != "zero" else str(int(numbers[1]) + int(numbers[2]))
        text = {"wrong": "#### 7", "invalid": f"It is {total}", "cut": "Well, 1 and"}
        message["content"] = text.get(label, f"{numbers[1]} and {numbers[2]} make {total}.\n#### {total}")
    answer: Body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": body["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16},
    }
    if body.get("readouts"):
        answer["choices"][0] |= _read(body, label)
    if label == "uncounted":
        del answer["usage"]
    if body.get("store_activations") and label != "silent":
        answer["activations_meta"] = _activations(body, label, number)
    return answer


def _read(body: Body, label: str) -> Body:
    """Each readout is surer of a right answer, token by token."""
    values = [[(-0.5 if label == "wrong" else 0.5) + 0.1 * token] for token in range(5)]
    one = {"labels": ["true"], "generated": {"first": 0, "values": values}}
    entries = [{"token": token, "logprob": -0.1, "bytes": None, "top_logprobs": []} for token in "abcde"]
    asked = {readout["name"]: one for readout in body["readouts"]}
    return {"readouts": asked} | ({"logprobs": {"content": entries}} if body.get("logprobs") else {})


def _activations(body: Body, label: str, number: int) -> Body:
    at = {
        "uri": "file:///data/s/000001.arrow",
        "first_row": 16 * number,
        "shape": [16, 8],
        "dtype": "bfloat16",
    }
    run = {"index": 0, "run_id": f"run-{number}", "tokens": 16, "prompt_tokens": 11, "points": {POINT: at}}
    if label == "unstored":
        failed = {"status": "failed", "reason": "the disk is full"}
        return {"session_id": body["session_id"], **failed, "runs": [run | {"points": {}}]}
    if label == "pending":
        return {"session_id": body["session_id"], "status": "pending", "runs": [run | {"points": {}}]}
    return {"session_id": body["session_id"], "status": "stored", "runs": [run]}
