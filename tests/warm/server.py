"""The process from which warm programs are forked: ``server.py <path of its socket>``.

It has one thread, has used neither gloo nor a parallel region, and forks a child for each connection. Over that it
sends the child's pid and, when the child has ended, its exit code. Closing the connection kills the child.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import warnings
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import tensordict  # noqa: F401 - imported for those that are forked from here
import torch.distributed.run  # noqa: F401

OURS = ("failure_roles", "mesh_jobs")
LARGEST = 1 << 17
"""Bytes of a request: arguments and environment."""

Request = tuple[dict[str, Any], list[int]]


def import_all() -> None:
    """Ours last: what hangs on our modules is collected and finalized in a child, what hangs on torch's is not.

    Collecting that would copy it all, and take longer than most programs run.
    """
    gc.collect()
    gc.freeze()
    for name in OURS:
        importlib.import_module(name)


def serve(path: str) -> Request:
    """Fork until standard input ends; in each child, return what it is to be."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    os.write(1, b"!")
    events = selectors.PollSelector()
    events.register(0, selectors.EVENT_READ)
    events.register(listener, selectors.EVENT_READ)
    while True:
        ((key, _), *_others) = events.select()
        if key.fileobj == 0:
            os._exit(0)
        elif key.fileobj is listener:
            request = fork(events, listener)
            if request is not None:
                return request
        else:
            look_after(events, key)


def fork(events: selectors.BaseSelector, listener: socket.socket) -> Request | None:
    """In the child: what was asked for, and its descriptors."""
    connection, _ = listener.accept()
    data, files, _, _ = socket.recv_fds(connection, LARGEST, 3)
    pid = os.fork()
    if pid == 0:
        close_all(events, connection)
        return json.loads(data), files
    for file in files:
        os.close(file)
    ended = os.pidfd_open(pid)
    events.register(ended, selectors.EVENT_READ, connection)
    events.register(connection, selectors.EVENT_READ, ended)
    connection.send(str(pid).encode())
    return None


def close_all(events: selectors.BaseSelector, connection: socket.socket) -> None:
    connection.close()
    for key in events.get_map().values():
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
        elif key.fd:
            os.close(key.fd)


def look_after(events: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    """Tell who asked for a child that it has ended, or end it because nobody waits for it."""
    events.unregister(key.fileobj)
    if isinstance(key.fileobj, socket.socket):
        signal.pidfd_send_signal(key.data, signal.SIGKILL)
        return
    ended = os.waitid(os.P_PIDFD, key.fd, os.WEXITED)
    os.close(key.fd)
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    if key.data in events.get_map():
        events.unregister(key.data)
        with contextlib.suppress(BrokenPipeError):
            key.data.send(str(code).encode())
    key.data.close()


def become(request: dict[str, Any], files: list[int]) -> CodeType | None:
    """Be a process of its own, as if it had just been started; what is left to run, in a new ``__main__``."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.executable = os.environ.get("PYTHON_EXEC", sys.executable)
    first, *sys.argv[:] = request["command"]
    if first == "-W":
        warnings.simplefilter(sys.argv.pop(0))  # type: ignore[arg-type]
        first = sys.argv.pop(0)
    if first == "-m":
        sys.modules.pop(sys.argv[0], None)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return None
    sys.modules["__main__"] = ModuleType("__main__")
    if first == "-c":
        source, sys.argv[0] = sys.argv[0], first
        return compile(source, "<string>", "exec", dont_inherit=True)
    sys.argv.insert(0, first)
    sys.path[0] = str(Path(first).parent)
    sys.modules["__main__"].__file__ = first
    return compile(Path(first).read_bytes(), first, "exec", dont_inherit=True)


def run(path: str) -> None:
    """Serve at ``path``; in each child, run what was asked for."""
    program = become(*serve(path))
    if program is not None:
        exec(program, vars(sys.modules["__main__"]))


if __name__ == "__main__":
    import_all()
    run(sys.argv[1])
