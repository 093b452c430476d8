"""A server that scores prompts: its requests are read as the real one reads them, and run in an engine."""

import threading
from types import TracebackType
from typing import Any, Self

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from deployments.engine import request as engine
from deployments.engine.engine import Engine
from deployments.interventions.resolve import EditResolver
from deployments.interventions.stored_tensors import FetchedTensors
from deployments.model.model import Model
from deployments.places.structure import structure
from serve_app.schemas.generation import CompletionRequest


class ScoringServer:
    """Runs in a thread; `bodies` are what it was asked, `refusal` is what it answers once it is set."""

    def __init__(self, model: Model) -> None:
        self.bodies: list[CompletionRequest] = []
        self.refusal: str | None = None
        self._model, self._engine = model, Engine(model)
        app = FastAPI()
        app.post("/v1/completions")(self._complete)
        app.get("/v1/model/structure")(lambda: structure(model.hf, model.points, model.context))
        self._uvicorn = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="none"))
        self._thread = threading.Thread(target=self._uvicorn.run)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._uvicorn.servers[0].sockets[0].getsockname()[1]}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._uvicorn.started:
            self._thread.join(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._uvicorn.should_exit = True
        self._thread.join()

    async def _complete(self, sent: Request) -> JSONResponse:
        if self.refusal:
            return JSONResponse({"error": {"message": self.refusal}}, status_code=400)
        body = CompletionRequest.model_validate_json(await sent.body())
        self.bodies.append(body)
        assert (body.echo, body.max_tokens) == (True, 0)
        assert body.logprobs is not None
        (prompt,) = body.prompts
        ids = self._model.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        changes = {f"interventions[{i}]": spec for i, spec in enumerate(body.interventions or [])}
        edits = EditResolver(self._model.points, torch.device("cpu"), changes, FetchedTensors({}, {}))
        made = edits.of(changes, len(ids), len(ids), lambda: ("", []))
        self._engine.submit(engine.Request("0", ids, max_tokens=0, prompt_logprobs=0, edits=made))
        logprobs: list[Any] = [None]
        done = False
        while not done:
            for event in self._engine.step():
                if isinstance(event, engine.PromptLogprobs):
                    logprobs += [one.logprob for one in event.logprobs]
                done = isinstance(event, engine.Finished)
        return JSONResponse({"choices": [{"text": "", "logprobs": {"token_logprobs": logprobs}}]})
