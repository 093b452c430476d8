"""What routes ask FastAPI for."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from deployments.activations.accounts import Account
from serve_app.backend import Backend
from serve_app.guard import Sender


# A coroutine, though it waits for nothing: FastAPI runs plain functions on a thread of their own.
async def _backend(connection: HTTPConnection) -> Backend:
    backend: Backend = connection.app.state.backend
    return backend


async def _account(sender: Sender, backend: Actors) -> Account:
    return Account(sender.owner, sender.is_admin, backend.reads_unowned)


Actors = Annotated[Backend, Depends(_backend)]
Who = Annotated[Account, Depends(_account)]
