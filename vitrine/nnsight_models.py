"""nnsight's remote client for a served model."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from vitrine.connection.blocking import wait
from vitrine.server import Server


def nnsight_model(server: Server, directory: str | Path | None = None) -> Any:
    """The served model in nnsight, without weights: `with model.trace(text, remote=True)` runs on the server.

    It needs nnsight, torch and transformers here, and the server's option `allow_client_code=true`. The model's
    configuration and tokenizer are loaded from the server's source: the hub, or a directory of this machine.

    Args:
        server: The server; its `model` is wrapped.
        directory: A directory with the model's configuration and tokenizer, if the server is on another machine.

    Returns:
        An `nnsight.TransformersModel`.

    Raises:
        ServerError: The server does not run clients' code; the message names the option for it.
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
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, **given)
    return made(str(source), task="text-generation", tokenizer=tokenizer, **given)


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
