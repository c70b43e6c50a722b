"""However the process that started a server ends, the server's ends too, and says nothing."""

from __future__ import annotations

import os
import pickle
import signal
import textwrap
from pathlib import Path

import pytest
from failure_scripts import Program, programs
from process_roles import HELD, SECONDS, ask, request
from support import is_gone, wait_until

from meshinfer import TransportError

START = """
    import multiprocessing, pickle
    import process_roles as roles
    from process_roles import Policy, ask, request, serving, serving_options
    """
MAIN = 'if __name__ == "__main__":'

OWNER = """
    from meshinfer.transport import INFERENCE_TRANSPORTS
    from support import PRELOADED
    multiprocessing.set_forkserver_preload(PRELOADED)
    rows = INFERENCE_TRANSPORTS
    kinds = sorted({row.kind for row in rows if "multiprocessing" in row.policy_backends})
    starts = [(kind, "forkserver") for kind in kinds] + [("process_slot", "spawn")]
    servers = [
        ProcessInferenceServer(Policy, kind, **serving_options(mp_context=method)).start()
        for kind, method in starts
    ]
    for server in servers:
        say("server", server.pid, pickle.dumps(server.client()).hex())
    if os.fork() == 0:  # inherits all pipes, and stays
        signal.pause()
    say("ready")
    signal.pause()
    """
INTERRUPTED = """
    with serving(mp_context="spawn") as server, server.client() as client:
        ask(client)
        say("server", server.pid)
        while True:
            ask(client)
    """
INTERRUPTED_EARLY = """
    server = ProcessInferenceServer(roles.never, "process_slot", **serving_options(mp_context="spawn"))
    def tell():
        while server.pid is None:
            time.sleep(0.001)
        say("server", server.pid)
    threading.Thread(target=tell).start()
    server.start()
    """
UNFINISHED = """
    kept = []
    def serve():
        server = ProcessInferenceServer(Policy, "process_slot", **serving_options(mp_context="fork"))
        kept.append(server.start())
        with server.client() as client:
            ask(client)
        say("server", server.pid)
    child = multiprocessing.get_context("fork").Process(target=serve)
    child.start()
    child.join()
    assert child.exitcode == 0
    serve()
    """
UNGUARDED = """
    with serving(mp_context="spawn") as server:
        pass
    """


def program(main: str, guard: bool = True) -> str:
    start = textwrap.dedent(START)
    body = textwrap.dedent(main)
    return start + (f"{MAIN}\n{textwrap.indent(body, '    ')}" if guard else body)


def assert_gone(started: Program, count: int = 1) -> None:
    for line in started.hear("server ", count):
        pid = int(line.split()[0])
        assert wait_until(lambda pid=pid: is_gone(pid), SECONDS), line


@pytest.mark.slow
def test_a_killed_owner_takes_its_servers_along(tmp_path: Path) -> None:
    """What they leave in /dev/shm fails the test afterwards."""
    with programs(tmp_path, owner=program(OWNER)) as running:
        owner = running["owner"]
        owner.hear("ready", timeout=90.0)
        count = sum(line.startswith("server ") for line in owner.lines)
        clients = [
            pickle.loads(bytes.fromhex(line.split()[1])) for line in owner.hear("server ", count)
        ]
        held = []
        for client in clients:
            ask(client)
            held.append(client.submit(request(HELD)))
        os.kill(owner.pid, signal.SIGKILL)
        for future in held:
            with pytest.raises(TransportError):
                future.result(SECONDS)
        assert_gone(owner, count)
        for client in clients:
            with pytest.raises(TransportError):
                client(request(1.0), SECONDS)
            client.close()


@pytest.mark.slow
def test_nothing_is_left_and_nothing_said_by_ends_without_a_shutdown(tmp_path: Path) -> None:
    sources = {
        "interrupted": program(INTERRUPTED),
        "interrupted_early": program(INTERRUPTED_EARLY),
        "unfinished": program(UNFINISHED),
        "unguarded": program(UNGUARDED, guard=False),
    }
    with programs(tmp_path, **sources) as running:
        for name in ("interrupted_early", "interrupted"):
            running[name].hear("server ", timeout=90.0)
            running[name].signal_group(signal.SIGINT)
            ending = running[name].ending()
            # torch imports tabulate at the exit where that is installed, and Python then forgets the interrupt
            assert ending.code in (-signal.SIGINT, 1), ending.stderr
            assert ending.stderr.count("Traceback") == 1
            assert ending.stderr.strip().endswith("KeyboardInterrupt")
            assert_gone(running[name])
        running["unfinished"].ending().assert_clean()
        assert_gone(running["unfinished"], 2)
        ending = running["unguarded"].ending()
        assert ending.code == 1
        assert 'if __name__ == "__main__"' in ending.stderr.replace("'", '"')
        assert ending.stderr.count("bootstrapping phase") == 1
        assert "exited with code 1 before it was ready" in ending.stderr
