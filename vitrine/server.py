"""Connections to a server."""

from __future__ import annotations

import os
from types import TracebackType

from vitrine.connection.blocking import blocking, wait
from vitrine.connection.transport import api_root
from vitrine.experiments.attending import AttentionMethods
from vitrine.experiments.lenses import LensMethods
from vitrine.experiments.sweeping import SweepMethods

URL = "http://127.0.0.1:8000"
TIMEOUT_S = 660.0  # slightly more than the server's own limit, so that the server's error arrives first


class AsyncServer(AttentionMethods, LensMethods, SweepMethods):
    """An asynchronous server connection with the methods of `Server`, whose examples apply to both.

    Attributes:
        url: The server's address, without `/v1`.
        model: The id of the model that answers.

    Examples:
        >>> import asyncio
        >>> async def main():
        ...     async with await vitrine.connect_async(server.url) as twin:
        ...         return await twin.collect(["Ann has", "Tom has"], "layers.2.output")
        >>> asyncio.run(main()).values.shape
        (2, 1, 192)
    """

    async def __aenter__(self) -> AsyncServer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Server:
    """A server connection with blocking methods, for scripts and notebooks; `connect` and `serve` return one.

    Attributes:
        asynchronous: The asynchronous version of this object. Its methods run in a thread of this package.

    Examples:
        >>> server.model
        'vitrine-demo'
    """

    def __init__(self, asynchronous: AsyncServer) -> None:
        self.asynchronous = asynchronous

    complete = blocking(AsyncServer.complete)
    generate = blocking(AsyncServer.generate)
    collect = blocking(AsyncServer.collect)
    load_runs = blocking(AsyncServer.load_runs)
    tokens = blocking(AsyncServer.tokens)
    lens = blocking(AsyncServer.lens)
    patch_grid = blocking(AsyncServer.patch_grid)
    sweep = blocking(AsyncServer.sweep)
    attention = blocking(AsyncServer.attention)

    @property
    def url(self) -> str:
        """The server's address, without `/v1`."""
        return self.asynchronous.url

    @property
    def model(self) -> str:
        """The id of the model."""
        return self.asynchronous.model

    def close(self) -> None:
        """Close the connections; if `serve` started the server, stop it."""
        wait(self.asynchronous.close())

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Server({self.url!r}, model={self.model!r})"


async def connect_async(
    url: str = URL, *, api_key: str | None = None, model: str | None = None, timeout: float = TIMEOUT_S
) -> AsyncServer:
    """Connect to a server asynchronously. Arguments and errors are those of `connect`.

    Examples:
        >>> import asyncio
        >>> async def main():
        ...     async with await vitrine.connect_async(server.url) as twin:
        ...         return twin.model
        >>> asyncio.run(main())
        'vitrine-demo'
    """
    server = AsyncServer(api_root(url), api_key or os.environ.get("OPENAI_API_KEY"), timeout)
    try:
        served = [one["id"] for one in (await server.get("/models", repeat=False))["data"]]
        if not served or model not in (None, *served):
            there = ", ".join(served) or "no model yet"
            raise ValueError(f"model: {url} serves {there}; {model or 'a model'} was asked for")
    except BaseException:  # close, then re-raise
        await server.close()
        raise
    server.model = model or served[0]
    return server


def connect(
    url: str = URL, *, api_key: str | None = None, model: str | None = None, timeout: float = TIMEOUT_S
) -> Server:
    """Connect to a running server.

    Args:
        url: The server's address, with or without `/v1`.
        api_key: The API key, if the server needs one; by default the environment variable `OPENAI_API_KEY`.
        model: The id of the model; by default the first served one.
        timeout: Seconds to wait for each answer.

    Raises:
        ConnectionError: The server does not answer.
        ServerError: It rejects the key.
        ValueError: It does not serve the model, or the address is invalid.

    Examples:
        >>> with vitrine.connect(server.url) as again:
        ...     print(again.model)
        vitrine-demo
    """
    return Server(wait(connect_async(url, api_key=api_key, model=model, timeout=timeout)))
