"""Blocking versions of asynchronous methods, for scripts and for notebooks, which already run an event loop."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_making = threading.Lock()


def blocking(method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _R]]) -> Callable[Concatenate[Any, _P], _R]:
    """A blocking version of a method of `asynchronous`, with its signature and docstring."""

    @functools.wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return wait(method(self.asynchronous, *args, **kwargs))

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
