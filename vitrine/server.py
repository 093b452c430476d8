"""Connections to a server, and nnsight's client for its model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vitrine.connection.blocking import blocking, wait
from vitrine.connection.transport import api_root
from vitrine.experiments.patching import PatchGridMethods
from vitrine.experiments.sweeping import SweepMethods

URL = "http://127.0.0.1:8000"
TIMEOUT_S = 660.0  # slightly more than the server's own limit, so that the server's error arrives first


class AsyncServer(PatchGridMethods, SweepMethods):
    """An asynchronous server connection with the methods of `Server`, whose examples apply to both.

    Attributes:
        url: The server's address, without `/v1`.
        model: The id of the model.

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

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @contextmanager
    def _in_nnsight(self) -> Iterator[Any]:
        with connect(self.url, api_key=self.api_key, model=self.model, timeout=self.timeout) as server:
            yield nnsight_model(server)


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
    activations = blocking(AsyncServer.activations)
    load_runs = blocking(AsyncServer.load_runs)
    tokens = blocking(AsyncServer.tokens)
    lens = blocking(AsyncServer.lens)
    attribute = blocking(AsyncServer.attribute)
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

    def __exit__(self, *error: object) -> None:
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
        served = [entry["id"] for entry in (await server.get("/models", repeat=False))["data"]]
        if not served or model not in (None, *served):
            models = ", ".join(served) or "no model yet"
            raise ValueError(f"model: {url} serves {models}; {model or 'a model'} was asked for")
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
        url: The server's address, with or without `/v1`; by default `http://127.0.0.1:8000`.
        api_key: The API key, if the server needs one; by default the environment variable `OPENAI_API_KEY`.
        model: The id of the model; by default the first served one.
        timeout: Seconds for each request, with retries while the server is busy (408, 429, 503); by default 660.

    Raises:
        ConnectionError: The server does not respond.
        ServerError: It rejects the key.
        ValueError: It does not serve the model, or the address is invalid.

    Examples:
        >>> with vitrine.connect(server.url) as again:
        ...     print(again.model)
        vitrine-demo
    """
    return Server(wait(connect_async(url, api_key=api_key, model=model, timeout=timeout)))


def nnsight_model(server: Server, directory: str | Path | None = None, **options: Any) -> Any:
    """The served model in nnsight, without weights: `with model.trace(text, remote=True)` runs on the server.

    It needs nnsight, torch and transformers here, and the server's option `allow_client_code=true`. The model's
    configuration and tokenizer are loaded from the server's source: the hub, or a directory of this machine.

    Args:
        server: The server; its `model` is wrapped.
        directory: A directory with the model's configuration and tokenizer, if the server is on another machine.
        options: Further arguments of `nnsight.TransformersModel`, such as `rename={"model.layers": "blocks"}`.

    Returns:
        An `nnsight.TransformersModel`.

    Raises:
        ServerError: The server does not run remote nnsight code; the message names the option for it.
        PermissionError: The key may not run code.
        ImportError: nnsight is not installed here.
        FileNotFoundError: The model is from a directory that is not on this machine.

    Examples:
        >>> model = vitrine.nnsight_model(server)
        >>> with model.trace("Ann has 3 boxes of 12 pens.", remote=True):
        ...     hidden = model.model.layers[3].output.save()
        >>> hidden.shape
        torch.Size([1, 13, 192])
    """
    get = server.asynchronous.get
    deployed = wait(get(f"{server.url}/status"))["deployments"][server.model]
    if wait(get(f"{server.url}/whoami"))["tags"] == ["use"]:
        raise PermissionError("this API key may not run code: that needs a key with the role code or admin")
    source = directory or wait(get(f"/models/{quote(server.model)}"))["source"]
    if Path(source).is_absolute() and not Path(source).is_dir():
        raise FileNotFoundError(f"the server's model is from {source}, which is not on this machine: give directory=")
    try:
        import transformers

        made = _served_class(server, deployed["model_key"])
    except ImportError as error:
        raise ImportError(
            "nnsight_model needs nnsight: pip install -c constraints.txt nnsight transformers torch", name=error.name
        ) from error
    own_code = {"trust_remote_code": True} if deployed["trust_remote_code"] else {}
    given = {"revision": deployed["revision"], **own_code}
    if "tokenizer" not in options:
        options["tokenizer"] = transformers.AutoTokenizer.from_pretrained(source, **given)
    return made(str(source), task="text-generation", **given, **options)


def _served_class(server: Server, key: str) -> Any:
    """A subclass of nnsight's class with the server's address and its key for the model."""
    from nnsight import TransformersModel
    from nnsight.intervention.backends.remote import RemoteBackend

    class Served(TransformersModel):  # type: ignore[misc]
        def to_model_key(self) -> str:
            return key

        def _remote_backend(self, remote: bool | str, blocking: bool, job_id: str | None, verbose: bool) -> Any:
            if remote == "local":
                return super()._remote_backend(remote, blocking, job_id, verbose)
            env = self._remoteable_get_env()
            host = server.url if remote is True else remote
            return RemoteBackend(key, host, server.asynchronous.api_key, env, blocking, job_id, verbose)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return object.__new__, (TransformersModel,), self.__getstate__()  # the server does not have this subclass

    return Served
