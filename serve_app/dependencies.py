"""What routes ask FastAPI for."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from serve_app.backend import Backend


# A coroutine, though it waits for nothing: FastAPI runs plain functions on a thread of their own.
async def _backend(connection: HTTPConnection) -> Backend:
    backend: Backend = connection.app.state.backend
    return backend


Actors = Annotated[Backend, Depends(_backend)]
