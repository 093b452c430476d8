"""Attacks of a client's code on the server and other clients, in each sandbox that this system supports."""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from deployments.client_code import namespaces, processes, runner, seccomp
from deployments.client_code.execution import JobModel
from deployments.client_code.job import CodeJob, Kind, Limits, ModelKey, receive
from deployments.client_code.kernel import ARM
from deployments.client_code.processes import JobProcesses
from deployments.client_code.sandbox import Sandbox, landlock_version
from deployments.demo_model import WEIGHTS
from deployments.errors import LoadError
from deployments.model.load import load
from deployments.options import Options

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.slow
LIMITS = Limits(seconds=30, memory_bytes=1 << 30, result_bytes=1 << 20, log_bytes=1 << 20, threads=2)
ALL = Sandbox(on=True, landlock=landlock_version(), seccomp=seccomp.available())
SANDBOXES = {
    "as root": replace(ALL, namespaces=True, other_user=True),
    "in a user namespace": replace(ALL, namespaces=True, user_namespace=True),
    "with the devices of a GPU": replace(ALL, namespaces=True, user_namespace=True, gpu=True),
    "without namespaces": ALL,
}
PRELUDE = """
import ctypes, fcntl, importlib, mmap, os, signal, socket, struct, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
def found():
    return os.stat(MAIN)
def open_socket():
    return next(int(fd) for fd in os.listdir('/proc/self/fd') if os.readlink(f'/proc/self/fd/{fd}')[:6] == 'socket')
def larger_stack():
    libc.mremap.restype, pages = ctypes.c_void_p, [line for line in open('/proc/self/maps') if '[stack]' in line]
    page = ctypes.c_void_p(int(pages[0].split('-')[0], 16))  # the lowest: a copied page is left empty
    if (libc.mremap(page, ctypes.c_size_t(4096), ctypes.c_size_t(4096), 5, None) or 0) == 2 ** 64 - 1:  # a copy
        raise OSError(ctypes.get_errno(), 'mremap')
def call(function, *args):
    if getattr(libc, function)(*args) < 0:
        raise OSError(ctypes.get_errno(), function)
"""
# Each is possible on a server whose jobs have no sandbox.
ATTACKS = {
    "the key file is read": "open(KEYS).read()",
    "the environment of the replica is read": "open(f'/proc/{REPLICA}/environ').read()",
    "the environment of the first process is read": "open('/proc/1/environ').read()",
    "Ray's token is read": "open(f'{HOME}/.ray/auth_token').read()",
    "a home directory is listed": "os.listdir(HOME)",
    "the memory of the replica is opened": "open(f'/proc/{REPLICA}/mem', 'r+b')",
    "the memory of the replica is written by a call": "call('process_vm_writev', REPLICA, None, 0, None, 0, 0)",
    "the weights are opened to be written": "open(f'/proc/{REPLICA}/fd/{WEIGHTS}', 'r+b')",
    "a port of this machine is connected to": "socket.create_connection(('127.0.0.1', PORT))",
    "a socket in the file system is connected to": "socket.socket(socket.AF_UNIX).connect(SOCKET)",
    "an abstract socket is connected to": "socket.socket(socket.AF_UNIX).connect(chr(0) + ABSTRACT)",
    "a process is forked": "os.fork() or os._exit(0)",
    "a process is cloned": "call('syscall', 56 if os.uname().machine == 'x86_64' else 220, 17, 0, 0, 0, 0)",
    "a shell is started": "subprocess.run(['/bin/sh', '-c', ':'], check=True)",
    "this process becomes a shell": "os.execv('/bin/sh', ['/bin/sh', '-c', ':'])",
    "a home directory is written to": "open(f'{HOME}/planted', 'w')",
    "the server's code is written to": "open(f'{CODE}/runner.py', 'r+')",
    "a file is removed": "os.remove(f'{HOME}/removable')",
    "the replica is signalled": "os.kill(REPLICA, 0)",
    "all processes are signalled": "os.kill(-1, 0)",
    "the replica is traced": "call('ptrace', 0x4206, REPLICA, None, None)",
    "the replica's limits are changed": "importlib.import_module('resource').prlimit(REPLICA, 4)",
    "a user namespace is made": "call('unshare', 0x10000000)",
    "a file system is mounted": "call('mount', b'none', b'/tmp', None, 0x1000, None)",
    "another session is begun": "call('setsid')",
    "the end with the host is put off": "call('prctl', 1, 0, 0, 0, 0)",
    "memory is shared, beyond the limit": "mmap.mmap(-1, 2 << 30)",
    "a file is made of memory": "os.memfd_create('taken')",
    "memory of System V is made": "call('shmget', 0, 4096, 0o1600)",
    "a ring of the kernel is set up": "call('syscall', 425, 1, ctypes.create_string_buffer(120))",
    "a handle to the replica is taken": "os.pidfd_open(REPLICA)",
    "memory is shared by a device, beyond the limit": "mmap.mmap(os.open('/dev/zero', os.O_RDWR), 2 << 30)",
    "memory grows downwards, beyond the limit": "mmap.mmap(-1, 2 << 30, flags=0x122)",
    "the stack is made larger, beyond the limit": "larger_stack()",
    "a pipe signals the replica": "fcntl.fcntl(os.pipe()[0], 8, REPLICA)",
    "the replica becomes the owner of a pipe": "fcntl.fcntl(os.pipe()[0], 15, struct.pack('ii', 1, REPLICA))",
    "a pipe kills": "fcntl.fcntl(os.pipe()[0], 10, signal.SIGKILL)",
    "a socket signals the replica": "fcntl.ioctl(open_socket(), 0x8901, struct.pack('i', REPLICA))",
    "the replica becomes the owner of a socket": "fcntl.ioctl(open_socket(), 0x8902, struct.pack('i', REPLICA))",
    "the mode of the server's code is changed": "os.chmod(MAIN, found().st_mode & 0o7777)",
    "the mode of an open file is changed": "os.fchmod(os.open(MAIN, os.O_RDONLY), found().st_mode & 0o7777)",
    "the owner of the server's code is changed": "os.chown(MAIN, -1, -1)",
    "the times of the server's code are changed": "os.utime(MAIN, ns=(found().st_atime_ns, found().st_mtime_ns))",
    "an attribute is added to the server's code": "os.setxattr(MAIN, 'user.planted', b'x')",
    "the server's code is emptied": "os.truncate(MAIN, 0)",
    "flags of the server's code are changed": "fcntl.ioctl(os.open(MAIN, os.O_RDONLY), 0x40086602, bytes(8))",
    "the replica is moved to other cores": "os.sched_setaffinity(REPLICA, os.sched_getaffinity(0))",
}
# Not tried without a sandbox: what they would change, or since the system itself refuses them to some users.
HARMFUL = {
    "a file system is mounted",
    "a process is cloned",
    "a ring of the kernel is set up",
    "a user namespace is made",
    "an attribute is added to the server's code",
    "another session is begun",
    "flags of the server's code are changed",
    "the environment of the first process is read",
    "the memory of the replica is opened",
    "the memory of the replica is written by a call",
    "the replica is traced",
    "the server's code is emptied",
    "this process becomes a shell",
}
# What the kernel says of what a sandbox keeps away; anything else is a mistake in the attack.
REFUSALS = {errno.EPERM, errno.EACCES, errno.ENOENT, errno.ESRCH, errno.EROFS}
HEADERS = (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h"))


@dataclass(frozen=True)
class Harmful:
    """A block that runs code when it is opened."""

    code: str

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self.code, {})


class Jobs:
    """Runs code in jobs, and gives what it prints."""

    def __init__(self, model: JobModel, names: dict[str, Any]) -> None:
        self.processes = JobProcesses(model)
        self.sandbox = model.sandbox
        self._names = names

    def printed(self, code: str) -> str:
        names = "\n".join(f"{name} = {value!r}" for name, value in self._names.items())
        block = pickle.dumps(Harmful(f"{names}\n{PRELUDE}\n{code}"))
        job = CodeJob("job", block, False, {}, ModelKey(repo_id="vitrine-demo"), False)
        process = self.processes.start(job, LIMITS)
        said = []
        with process.socket:
            try:
                while (frame := receive(process.socket))[0] in (Kind.LOG, Kind.RUNNING):
                    said.append(frame[1].decode())
            except (EOFError, ConnectionError):
                said.append("the process ended")
            else:
                said.append(f"{frame[0]}: {frame[1].decode()}")
            finally:
                process.kill()
        return "\n".join(said)

    def attempt(self, attacks: list[str]) -> dict[str, str]:
        """What became of each attack, in one job: that it was done, or why not."""
        tried = "try:\n    {body}\n"
        tried += "except OSError as error:\n    print({name!r}, 'failed with', error.errno, repr(error))\n"
        tried += "except BaseException as error:\n    print({name!r}, 'went wrong with', repr(error))\n"
        tried += "else:\n    print({name!r}, 'was done')"
        printed = self.printed("\n".join(tried.format(name=name, body=ATTACKS[name]) for name in attacks))
        return {name: line for name in attacks for line in printed.splitlines() if line.startswith(f"{name} ")}


@pytest.fixture(scope="module")
def model():
    return load(str(WEIGHTS), dtype="float32", device="cpu", share=True)


@pytest.fixture(scope="module")
def names(model, tmp_path_factory):
    """What attacks aim at: this process stands for the replica."""
    home = tmp_path_factory.mktemp("home")
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("token")
    (home / "removable").touch()
    (home / "keys").write_text("admin:sk-0123456789abcdef")
    abstract = f"vitrine-{os.getpid()}"
    with ExitStack() as stack:
        port, path, name = (socket.socket(family) for family in (socket.AF_INET, socket.AF_UNIX, socket.AF_UNIX))
        for listening, address in ((port, ("127.0.0.1", 0)), (path, str(home / "socket")), (name, f"\0{abstract}")):
            stack.enter_context(listening)
            listening.bind(address)
            listening.listen()
        yield {
            "KEYS": str(home / "keys"),
            "HOME": str(home),
            "REPLICA": os.getpid(),
            "WEIGHTS": model.shared.fd,
            "PORT": port.getsockname()[1],
            "SOCKET": str(home / "socket"),
            "ABSTRACT": abstract,
            "CODE": str(Path(runner.__file__).parent),
            "MAIN": str(runner.__file__),  # which jobs may read
        }


@contextmanager
def closed_umask() -> Iterator[None]:
    """Files that are made in the block, and by a host that it starts, are for their user alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def made(model, sandbox: Sandbox, names: dict[str, Any]) -> Jobs:
    return Jobs(JobModel(model.shared, model.tokenizer, sandbox), names)


# A GPU's devices are let into a user namespace in addition.
@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.long) if "GPU" in name else name for name in SANDBOXES],
)
def jobs(request, model, names, forked_hosts):
    sandbox = SANDBOXES[request.param]
    sandbox_code = f"Sandbox(**{vars(sandbox)!r})"
    # In a process of its own, since it forks.
    code = f"from deployments.client_code.sandbox import Sandbox, _failure; print(_failure({sandbox_code}))"
    failure = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    if failure.strip():
        pytest.skip(f"this system has no such sandbox: {failure}")
    if not (sandbox.landlock and sandbox.seccomp):
        pytest.skip("this kernel has no Landlock or no seccomp")
    with closed_umask():  # of the host of the jobs
        jobs = made(model, sandbox, names)
        assert "started" in jobs.printed("print('started')")
    yield jobs
    jobs.processes.close()


@pytest.fixture(scope="module")
def unheld(model, names, forked_hosts):
    jobs = made(model, Sandbox(), names)
    yield jobs
    jobs.processes.close()


@pytest.fixture(scope="module")
def attempted(jobs):
    return jobs.attempt(list(ATTACKS))


@pytest.mark.parametrize("attack", ATTACKS)
def test_it_fails_in_a_sandbox_that(attempted, attack):
    failure = re.match(rf"{re.escape(attack)} failed with (\d+) ", attempted[attack])
    assert failure, attempted[attack]
    assert int(failure[1]) in REFUSALS, attempted[attack]


def test_every_refused_call_fails_by_the_filter(jobs):
    numbers = {name: both[ARM] for name, both in seccomp.REFUSED.items() if both[ARM] is not None}
    code = f"""
for name, number in {numbers!r}.items():
    ctypes.set_errno(0)
    if libc.syscall(number, -1, -1, -1, -1, -1, -1) != -1 or ctypes.get_errno() != 1:
        print('not refused:', name, ctypes.get_errno())
print('all were tried')
"""
    assert jobs.printed(code).splitlines()[1] == "all were tried"


def test_a_job_has_so_many_threads_and_no_more(jobs, model):
    if not jobs.sandbox.other_user:
        pytest.skip("the kernel does not count the threads of root's jobs")
    code = """
ends, begun = threading.Event(), 0
threading.stack_size(1 << 16)
try:
    for begun in range(2000):
        threading.Thread(target=ends.wait, daemon=True).start()
except RuntimeError:
    print('stopped', 500 < begun < 1024)
"""
    assert "stopped True" in jobs.printed(code)


def test_a_user_namespace_counts_its_own_threads():
    if not namespaces.count_threads():
        pytest.skip("this kernel counts all of the user's threads")
    code = """
import os, resource, threading
from deployments.client_code import kernel, namespaces
if os.geteuid() == 0:
    namespaces.become_other()  # root's threads have no limit
    kernel.call('prctl', kernel.PR_SET_DUMPABLE, 1, 0, 0, 0)
try:
    kernel.call('unshare', namespaces.NEWUSER)
except OSError:
    raise SystemExit('no namespace')
kernel.drop_capabilities()
resource.setrlimit(resource.RLIMIT_NPROC, (20, 20))
ends = threading.Event()
try:
    for begun in range(100):
        threading.Thread(target=ends.wait, daemon=True).start()
except RuntimeError:
    print('threads', begun + 1, flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    if "no namespace" in done.stderr:
        pytest.skip("this system makes no user namespaces without root's rights")
    assert done.stdout == "threads 20\n", done.stderr


@pytest.mark.parametrize("machine", [0, 1], ids=["x86-64", "ARM"])
def test_the_calls_have_the_numbers_that_the_kernels_headers_give(machine):
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not installed")
    text = HEADERS[machine].read_text()
    header = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    ours = seccomp.REFUSED | seccomp.OWN_PROCESS_ONLY | {name: both for name, (both, *_) in seccomp.BY_ARGUMENT.items()}
    ours |= {"clone3": seccomp.CLONE3}
    numbers = {name: both[machine] for name, both in ours.items()}
    assert len({*numbers.values()} - {None}) == sum(number is not None for number in numbers.values())
    # A header may be older than a call, whose number then is beyond all of the header's.
    newer = {name for name, number in numbers.items() if name not in header and (number or 0) > header["mount_setattr"]}
    assert {name: header.get(name) for name in numbers if name not in newer} == {
        name: number for name, number in numbers.items() if name not in newer
    }


@pytest.fixture(scope="module")
def done(unheld):
    return unheld.attempt([attack for attack in ATTACKS if attack not in HARMFUL])


@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if attack not in HARMFUL])
def test_it_is_possible_without_a_sandbox_that(done, attack):
    assert done[attack] == f"{attack} was done"


def test_what_a_job_needs_works_in_a_sandbox(jobs):
    code = """
import torch
from concurrent.futures import ThreadPoolExecutor
importlib.import_module('transformers.models.gpt_neox.modeling_gpt_neox')
importlib.import_module('colorsys')
product = torch.ones(512, 512) @ torch.ones(512, 512)
print(sum(ThreadPoolExecutor(4).map(lambda i: float(product[i, i]), range(4))))
print(len(os.urandom(8)), open(os.devnull, 'w').write('nothing'), len(os.listdir('/usr')) > 0)
print(open('/proc/self/status').readline().startswith('Name'))
grown = bytearray()
for _ in range(64):
    grown.extend(bytes(1 << 20))
print(len(grown) >> 20)
"""
    said = jobs.printed(code).splitlines()
    assert said[1:5] == ["2048.0", "8 7 True", "True", "64"]


def test_a_job_holds_no_module_of_ray_and_no_rights_of_root(jobs):
    code = """
print('ray' in sys.modules)
status = dict(line.split(':') for line in open('/proc/self/status'))
print([int(status[name], 16) for name in ('CapInh', 'CapPrm', 'CapEff', 'CapAmb', 'NoNewPrivs')])
"""
    assert jobs.printed(code).splitlines()[1:3] == ["False", "[0, 0, 0, 0, 1]"]


def test_temporary_files_are_the_jobs_own_and_bounded(jobs, names):
    code = """
import tempfile, torch
try:
    with tempfile.TemporaryDirectory() as directory:
        torch.save(torch.ones(3), f'{directory}/ones')
        print('saved', len(torch.load(f'{directory}/ones')))
    with tempfile.NamedTemporaryFile() as file:
        print('small', file.write(b'x'), file.name)
        for _ in range(2):
            open(f'{tempfile.gettempdir()}/{_}', 'wb').write(bytes(48 << 20))
except OSError as error:
    print('large', error.errno)
"""
    before = set(Path("/tmp").iterdir())
    said = jobs.printed(code)
    assert "large" in said
    assert ("saved 3" in said) == jobs.sandbox.namespaces
    assert ("small" in said) == ("small" in jobs.printed(code))  # nothing is left of the first
    assert {path.name for path in set(Path("/tmp").iterdir()) - before}.isdisjoint({"0", "1"})


def test_a_job_that_was_killed_leaves_nothing_behind(jobs, eventually):
    name = f"held{os.getpid()}"
    code = f"libc.prctl(15, b'{name}', 0, 0, 0)\nprint('begins')\nwhile True: pass"
    block = pickle.dumps(Harmful(PRELUDE + code))
    job = CodeJob("job", block, False, {}, ModelKey(repo_id="vitrine-demo"), False)
    process = jobs.processes.start(job, LIMITS)
    with process.socket:
        assert receive(process.socket)[0] is Kind.RUNNING
        assert receive(process.socket) == (Kind.LOG, b"begins")
        assert is_running(name)
        process.kill()
    eventually(lambda: not is_running(name))


def is_running(name: str) -> bool:
    return any(process.info["name"] == name for process in psutil.process_iter(["name"]))


# ---- what a system without namespaces may do


@pytest.fixture
def weak(monkeypatch):
    """A system that has Landlock and seccomp, and no namespaces."""
    monkeypatch.setattr(runner, "sandbox", lambda gpu: Sandbox(on=True, landlock=1, seccomp=True))


@pytest.mark.usefixtures("weak")
@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", None])
def test_others_run_no_code_where_it_cannot_be_isolated(host):
    with pytest.raises(LoadError, match="client_code_sandbox=none") as refused:
        runner._sandbox(Options(), False, host)
    assert refused.value.field == "client_code_sandbox"
    assert not runner._sandbox(Options(client_code_sandbox="none"), False, host).on
    assert runner._sandbox(Options(), False, "127.0.0.1").seccomp  # this machine may


@pytest.fixture(scope="module")
def best():
    return processes.sandbox(gpu=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's jobs run as another user")
@pytest.mark.parametrize("own_files", [False, True])
def test_a_sandbox_is_not_taken_where_its_user_cannot_reach_a_library(tmp_path, own_files):
    library = tmp_path / "closed" / "site-packages"
    library.mkdir(parents=True)
    library.chmod(0o700)
    sandbox = f"Sandbox(on=True, other_user=True, namespaces={own_files})"
    code = f"import sys; sys.path.append({str(library)!r})\n"
    code += f"from deployments.client_code.sandbox import Sandbox, _failure; print(_failure({sandbox}))"
    run = [sys.executable, "-c", code]
    failure = subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "Permission denied" in failure
    assert str(library) in failure or not own_files


def test_root_isolates_jobs_wherever_it_can_make_namespaces(best):
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux can be sure of namespaces")
    unshare = ["unshare", "--mount", "--net", "--pid", "--fork", "true"]
    if not shutil.which("unshare") or subprocess.run(unshare, check=False, capture_output=True).returncode:
        pytest.skip("this system lets root make no namespaces")
    assert best.isolates, str(best)
