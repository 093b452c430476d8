"""Runs one job in its forked process: the client's block on the served weights."""

from __future__ import annotations

import dis
import io
import json
import linecache
import os
import pickle
import random
import re
import resource
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
import zstandard
from nnsight import Envoy, TransformersModel
from nnsight.schema.request import RequestModel
from nnsight.tracing.tracer import _saves, dec, inc
from nnsight.tracing.util import clean_traceback, filter_traceback
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from deployments.client_code.job import Kind, Limits, receive, send
from deployments.client_code.kernel import PR_SET_PDEATHSIG, call
from deployments.client_code.namespaces import TMP_BYTES, count_threads
from deployments.client_code.sandbox import Sandbox
from deployments.model.weights import SharedWeights

NICE = 10  # the replica's own threads come first
FIRST_KILLED = "1000"  # by the kernel, where the machine's memory ends
FLUSH_S = 0.05
MAX_ERROR_CHARACTERS = 1 << 16  # characters of a failure
LEVEL = 3  # of zstd: a result is compressed once and sent once
MOST_FILES = 1024
MOST_THREADS = 1024


# Values that a block cannot change, and the model, which stays in the job.
_UNCHANGEABLE: tuple[type, ...] = (int, float, complex, str, bytes, type(None), type)
_UNCHANGEABLE += (types.FunctionType, types.ModuleType, Envoy)

_ADAPTER_PART = re.compile(r"\.(base_layer|lora_\w+|original_module|modules_to_save)(\.|$)")  # a module's path

LINE_BYTES = 100  # that a printed line counts besides its text: each is a message
LONGEST_LINE = 1 << 14  # characters that wait for a line's end


class ReplicaSocket:
    """The socket to the replica, for any of the job's threads."""

    def __init__(self, to: socket.socket) -> None:
        self._to = to
        self._lock = threading.Lock()

    @property
    def sending(self) -> bool:
        """Whether a message is being sent."""
        return self._lock.locked()

    def send(self, kind: Kind, body: bytes) -> None:
        """Send a frame whole."""
        with self._lock:
            send(self._to, kind, body)


class JobLog(io.TextIOBase):
    """Sends what is printed, line by line, as long as that is not too much."""

    encoding = "utf-8"

    def __init__(self, to: ReplicaSocket, most: int) -> None:
        self._to = to
        self._left = most
        self._begun: dict[int, str] = {}  # each thread's line that has no end yet
        self._lock = threading.RLock()

    def writable(self) -> bool:
        """Whether it takes text: always."""
        return True

    def write(self, text: str) -> int:
        """Take text; whole lines go out, and long ones as they are."""
        me = threading.get_ident()
        with self._lock:
            *lines, last = (self._begun.pop(me, "") + text).split("\n")
            for line in lines:
                self._send(line)
            if last:
                self._begun[me] = last
            if len(last) > LONGEST_LINE:
                self.flush()
        return len(text)

    def flush(self) -> None:
        """Send this thread's line that has no end yet."""
        with self._lock:
            if line := self._begun.pop(threading.get_ident(), ""):
                self._send(line)

    def flush_all(self) -> None:
        """Send every thread's."""
        with self._lock:
            while self._begun:
                self._send(self._begun.popitem()[1])

    def _send(self, line: str) -> None:
        if self._left <= 0:
            return
        data = line.encode(errors="replace")
        self._left -= len(data) + LINE_BYTES
        self._to.send(Kind.LOG, data if self._left > 0 else b"(output limit reached; the rest is dropped)")


@dataclass(frozen=True)
class JobModel:
    """The model of jobs with its tokenizer, and the sandbox of a job's process."""

    weights: SharedWeights
    tokenizer: Any
    sandbox: Sandbox


def run(replica: socket.socket, model: JobModel, weights_fd: int) -> NoReturn:
    """Run the job that the replica sends, send back its outcome, and end the process.

    Args:
        replica: The socket to it.
        model: The model of the job.
        weights_fd: The file with its weights.
    """
    to = ReplicaSocket(replica)
    try:
        _leave_the_host(replica.fileno(), weights_fd)
        storage = model.weights.mapped(weights_fd)
        os.close(weights_fd)
        model.sandbox.enter()  # CUDA's threads, which start with the module, would stay outside
        _, body = receive(replica)
        _, block = receive(replica)
        asked = json.loads(body)
        limits = Limits(**asked["limits"])
        module = _registered(model.weights.module(storage))
        wrapped = TransformersModel(module, tokenizer=model.tokenizer, task="text-generation")
        log = JobLog(to, limits.log_bytes)
        sys.stdout = sys.stderr = log
        _limit(limits, model.sandbox)
        model.sandbox.seal()
        _end_in_time(limits, to)
        outcome = _outcome(wrapped, asked, block, limits, to)
        signal.setitimer(signal.ITIMER_REAL, 0)
        log.flush_all()
        to.send(*outcome)
    except BaseException:  # noqa: BLE001 - the error goes to the replica, and the process ends
        to.send(Kind.FAILED, _cut(traceback.format_exc()))
    finally:
        os._exit(0)


def _outcome(
    model: TransformersModel, asked: dict[str, Any], block: bytes, limits: Limits, to: ReplicaSocket
) -> tuple[Kind, bytes]:
    """The frame with the job's result, or with its failure for the client."""
    try:
        persistent = model._remoteable_persistent_objects()
        if asked["env"].pop("peft", None):  # in the served weights already
            persistent = _WithAdapter(persistent)
        model._remoteable_set_env(asked["env"])
        tracer = RequestModel.deserialize(block, persistent, compress=asked["compress"])
        result = _result(tracer, _saved(tracer), asked["compress"])
    except BaseException as error:  # noqa: BLE001 - the client's code may raise anything; the error goes back to the client
        return Kind.FAILED, _cut(_error_text(error))
    if len(result) > limits.result_bytes:
        message = (
            f"ValueError: the saved values take {len(result)} bytes; this server returns at most {limits.result_bytes}"
        )
        return Kind.FAILED, f"{message}: save fewer, or parts of them".encode()
    return Kind.DONE, result


class _WithAdapter(dict[str, Any]):
    """Persistent objects, and an empty module for each that only a model with an adapter beside its weights has."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or bool(_ADAPTER_PART.search(str(key)))

    def __missing__(self, key: str) -> torch.nn.Module:
        return torch.nn.Module()


def _registered(module: torch.nn.Module) -> torch.nn.Module:
    """A module that can return hidden states and attentions: transformers registers only classes that it constructs."""
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            _CAN_RECORD_REGISTRY[part] = part._can_record_outputs
    return module


def _saved(tracer: Any) -> dict[str, Any]:
    """Run a block and return its saved values by the names in its frame.

    `Tracer.__exit__` does the same around a local block, where the client's own objects also keep what the block
    changes in them: those that are saved are returned by their names.

    Raises:
        ValueError: A saved object of the client has no name in the frame.
    """
    frame = tracer.info.frame
    sent = {**frame.f_globals, **frame.f_locals}
    frame.f_locals = names = _FrameNames(frame.f_locals)
    inc()
    try:
        tracer.execute(tracer.info.code)
        marked = set(_saves())
    finally:
        dec()
    own = {id(value): path for path, value in _objects(sent) if id(value) in marked}
    names.saved |= {name: value for name, value in names.items() if id(value) in own}
    for _, value in _objects(names.saved):
        own.pop(id(value), None)
    for path in own.values():
        name = re.split(r"[.[]", path)[0]
        message = f"{path} is saved, but is no local variable where the block is{_line(tracer, name)}"
        raise ValueError(f"{message}: save a new object under a name, such as `saved = nnsight.save([])`")
    return names.saved


def _objects(named: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Objects that a block can change, with how to reach them: those with these names, and those inside."""
    seen: set[int] = set()
    left = list(named.items())
    while left:
        path, value = left.pop()
        if id(value) in seen or isinstance(value, _UNCHANGEABLE):
            continue
        seen.add(id(value))
        yield path, value
        if isinstance(value, dict):
            left += [(f"{path}[{key!r}]", inside) for key, inside in value.items()]
        elif isinstance(value, list | tuple | set):
            left += [(f"{path}[{i}]", inside) for i, inside in enumerate(value)]
        elif not isinstance(value, torch.Tensor):
            left += [(f"{path}.{name}", inside) for name, inside in getattr(value, "__dict__", {}).items()]


def _line(tracer: Any, name: str) -> str:
    """Where a block names a variable first, as Python's tracebacks have it; empty if it does not."""
    for instruction in dis.get_instructions(tracer.info.code):
        if instruction.argval == name and instruction.positions and (line := instruction.positions.lineno):
            path = tracer.info.frame.f_code.co_filename
            return f' (File "{path}", line {line}: {linecache.getline(path, line).strip()})'
    return ""


class _FrameNames(dict[str, Any]):
    """A frame's names; records the values that are written back."""

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__(names)
        self.saved: dict[str, Any] = {}

    def update(self, names: dict[str, Any]) -> None:  # type: ignore[override]
        """Set names to values."""
        super().update(names)
        self.saved.update(names)


def _result(tracer: Any, saved: dict[str, Any], compress: bool) -> bytes:
    """Serialize saved values.

    Raises:
        TypeError: One cannot be serialized; has its name and where the block names it.
    """
    try:
        return _written(saved, compress)
    except Exception:
        for name, value in saved.items():
            try:
                _written({name: value}, compress)
            except Exception as error:  # noqa: BLE001 - a class decides how its instances are serialized
                message = f"the saved value {name!r} cannot be sent back{_line(tracer, name)}"
                raise TypeError(f"{message}: {type(error).__name__}: {error}") from None
        raise


def _written(saved: dict[str, Any], compress: bool) -> bytes:
    """Serialize saved values for the client's `torch.load`."""
    buffer = io.BytesIO()
    torch.save(saved, buffer, pickle_module=_COMPACT, pickle_protocol=4)
    return zstandard.compress(buffer.getvalue(), LEVEL) if compress else buffer.getvalue()


class _Compact(pickle.Pickler):
    """Serializes a view of a larger tensor as a copy; otherwise the whole larger tensor would be sent."""

    def reducer_override(self, value: Any) -> Any:
        """The serialization of such a view; the default for anything else."""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return NotImplemented
        if value.untyped_storage().nbytes() <= value.nbytes:
            return NotImplemented
        own = value.detach().clone()
        if isinstance(value, torch.nn.Parameter):
            own = torch.nn.Parameter(own)
        return own.requires_grad_(value.requires_grad).__reduce_ex__(4)  # type: ignore[no-untyped-call]


_COMPACT = types.SimpleNamespace(Pickler=_Compact, __name__="pickle", dumps=pickle.dumps)


def _error_text(error: BaseException) -> str:
    """The text of a failure: type, message and the client's own lines; its causes, too."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        cleaned = clean_traceback(getattr(link, "__intervention_tb__", link.__traceback__))
        link.__traceback__ = filter_traceback(cleaned, lambda frame: frame.f_code.co_filename != __file__)
        link = link.__cause__ or link.__context__
    return "".join(traceback.format_exception(error)).rstrip()


def _cut(text: str) -> bytes:
    """A text, cut to the maximum length of a failure."""
    if len(text) > MAX_ERROR_CHARACTERS:
        half, left_out = MAX_ERROR_CHARACTERS // 2, len(text) - MAX_ERROR_CHARACTERS
        text = f"{text[:half]}\n... ({left_out} characters are left out) ...\n{text[-half:]}"
    return text.encode(errors="replace")


# ---- limits of the process


def _leave_the_host(*keep: int) -> None:
    """Start a process group that ends with the host, and close all files except these."""
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.nice(NICE)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(FIRST_KILLED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in keep:
            try:
                os.close(fd)
            except OSError:  # the list's own
                continue


def _limit(limits: Limits, sandbox: Sandbox) -> None:
    """Apply the limits, and seed the random numbers: the host's state is the same for all jobs."""
    torch.seed()
    np.random.seed()
    random.seed()
    torch.set_num_threads(limits.threads)
    most = _private_bytes() + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sandbox.on:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, MOST_FILES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (TMP_BYTES, TMP_BYTES))
        most_stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
        resource.setrlimit(resource.RLIMIT_STACK, (most_stack, most_stack))
    if sandbox.other_user or (sandbox.user_namespace and count_threads()):  # else the server's threads count, too
        resource.setrlimit(resource.RLIMIT_NPROC, (MOST_THREADS, MOST_THREADS))


def _end_in_time(limits: Limits, to: ReplicaSocket) -> None:
    """Start the timer: a job that reaches the limit fails."""

    def late(*_: Any) -> None:
        if to.sending:  # half a message would corrupt all later ones
            signal.setitimer(signal.ITIMER_REAL, FLUSH_S)
            return
        raise TimeoutError(f"the job is not done after the server's limit of {limits.seconds:g} s")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limits.seconds)
    to.send(Kind.RUNNING, b"")


def _private_bytes() -> int:
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith("VmData:")]
    return int(line.split()[1]) << 10
