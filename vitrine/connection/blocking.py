"""Blocking versions of asynchronous methods, for scripts and for notebooks, which already run an event loop."""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from vitrine.server_error import ServerError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_making = threading.Lock()


def blocking(method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _R]]) -> Callable[Concatenate[Any, _P], _R]:
    """A blocking version of a method of `asynchronous`, with its signature, docstring, and hints at its keywords."""
    known = [name for name in inspect.signature(method).parameters if name not in ("self", "fields")]

    @functools.wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return wait(method(self.asynchronous, *args, **kwargs))
        except (TypeError, ServerError) as error:
            for name in kwargs.keys() - known if getattr(error, "code", "unknown_field") == "unknown_field" else ():
                if repr(name) in str(error) and (near := difflib.get_close_matches(name, known, 1)):
                    message = f"{method.__name__} has no argument {name!r}: did you mean {near[0]!r}?"
                    raise TypeError(message) from error
            raise

    return call


def wait(coroutine: Coroutine[Any, Any, _R]) -> _R:
    """Run a coroutine on the event loop of a background thread, and return its result.

    Raises:
        RuntimeError: The call comes from that event loop, which would wait for itself.
    """
    with _making:
        loop = _loop()
    if asyncio._get_running_loop() is loop:
        coroutine.close()
        raise RuntimeError("a function that the client calls cannot block: await the methods of server.asynchronous")
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:  # for example Ctrl-C
        future.cancel()
        raise


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="vitrine", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=_loop.cache_clear)  # a child has no thread that runs the loop
