"""Processes that end without a word: normally, early, by a signal, forked, and in any order."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import psutil
import pytest
from failure_roles import HELD, SECONDS, Doubler, ask, check, client_at, port_of, request, serving
from failure_scripts import Program, programs
from support import wait_until

ENDINGS = {
    "return": "",
    "sys_exit": "def leave():\n    sys.exit(0)\nleave()",
    "os_exit": "os._exit(0)",
    "raise_": "raise KeyError('at top level')",
    "from_thread": "t = threading.Thread(target=ask, args=(CLIENT, 3)); t.start(); t.join()",
}
CODES = {"raise_": 1}


def client_program(ending: str) -> str:
    code = ENDINGS[ending].replace("CLIENT", "client")
    return f"client = new_client(listen())\nask(client, 1)\nfor n in range(20): ask(client, n)\n{code}\n"


@pytest.mark.slow
def test_a_client_may_end_in_any_way_right_after_its_last_reply(tmp_path: Path) -> None:
    policy = Doubler()
    sources = {name: client_program(name) for name in ENDINGS}
    sources["pending"] = (
        f"client = new_client(listen())\nask(client, 1)\nkept = client.submit(request({HELD}))\n"
    )
    sources["many_pending"] = """
        client = new_client(listen())
        ask(client, 1)
        kept = [client.submit(request(n)) for n in range(500)]
        """
    sources["waiting_thread"] = f"""
        client = new_client(listen())
        ask(client, 1)
        waiting = threading.Thread(target=client, args=(request({HELD}),), daemon=True)
        waiting.start()
        while waiting.is_alive() and not client.in_flight:
            time.sleep(0.001)
        """
    sources["last_request"] = """
        client = new_client(listen())
        ask(client, 1)
        client.submit(request(5))
        client.close()
        """
    with serving(policy) as server, programs(tmp_path, cold=["return"], **sources) as running:
        for program in running.values():
            program.tell(str(port_of(server)))
        # Whoever's held request is computed: release it when its program has ended.
        for name, program in running.items():
            assert wait_until(
                lambda p=program: (policy.go_on.set(), p.process.poll() is not None)[1], 60.0
            ), name
        for name, program in running.items():
            ending = program.ending()
            ending.assert_not_aborted(name)
            assert ending.code == CODES.get(name, 0), (name, ending.stderr)
            if name == "raise_":
                assert "KeyError: 'at top level'" in ending.stderr
            elif name != "waiting_thread":  # which may say that its call was cut short
                assert ending.complaints() == [], name
        with server.client() as client:
            ask(client, 7, SECONDS)
        assert wait_until(lambda: server.stats().clients == 0, SECONDS)


@pytest.mark.slow
def test_a_server_may_end_in_any_way_without_a_shutdown(tmp_path: Path) -> None:
    start = """
        policy = Doubler()
        server = new_server(policy).start()
        say("port", server.transport.address.port)
        listen()
        """
    sources = {
        "return": "",
        "sys_exit": "def leave():\n    sys.exit(0)\nleave()",
        "raise_": "raise KeyError('at top level')",
        "pending": "assert policy.computing.wait(30)",
    }
    sources = {name: textwrap.dedent(start) + code for name, code in sources.items()}
    with programs(tmp_path, cold=["return"], **sources) as running:
        clients = {
            name: client_at(int(program.hear("port ")[0])) for name, program in running.items()
        }
        for client in clients.values():
            ask(client, 1)
        held = clients["pending"].submit(request(HELD))
        for program in running.values():
            program.tell()
        for name, program in running.items():
            ending = program.ending()
            ending.assert_not_aborted(name)
            assert ending.code == CODES.get(name, 0), (name, ending.stderr)
            if name != "raise_":
                assert ending.complaints() == [], name
        with pytest.raises(Exception, match="server"):
            held.result(SECONDS)
        for client in clients.values():
            with pytest.raises(Exception, match="server"):
                ask(client, 2, SECONDS)
            client.close()


LATE_CLIENT = """
    client = new_client(listen())
    ask(client, 1)
    say("served")
    if listen() == "ask":
        client._join = None  # nobody looks for a server that has said goodbye
        try:
            ask(client, 2)
        except ServerClosedError:
            say("closed")
    client.close()
    """


@pytest.mark.slow
def test_both_sides_may_leave_in_any_order_without_a_complaint(tmp_path: Path) -> None:
    """Server before clients, clients before server, one client first."""
    server_source = """
        from meshinfer.inference.distributed.reception import Reception

        Reception.close.__defaults__ = (30.0,)  # however long goodbyes take
        for _ in range(3):
            with new_server() as server:
                say("port", server.transport.address.port)
                listen()
        """
    sources = dict.fromkeys(("a1", "b1", "a2", "b2", "a3", "b3"), LATE_CLIENT)
    with programs(tmp_path, server=server_source, **sources) as running:
        server = running["server"]
        for round_ in (1, 2, 3):
            pair = [running[f"{name}{round_}"] for name in "ab"]
            port = server.hear("port ", round_)[-1]
            for client in pair:
                client.tell(port)
            for client in pair:
                client.hear("served")
            leave_in_order(round_, server, pair)
            for client in pair:
                client.ending().assert_clean()
        server.ending().assert_clean()


def leave_in_order(round_: int, server: Program, clients: list[Program]) -> None:
    first, second = clients
    if round_ == 1:  # the server long before the clients
        server.tell()
        server.hear("port ", 2)
        first.tell("leave")
        second.tell("ask")
        assert second.hear("closed")
    elif round_ == 2:  # the clients before the server
        for client in clients:
            client.tell("leave")
            client.process.wait(SECONDS)
        server.tell()
    else:  # one client, the server, the other client
        first.tell("leave")
        first.process.wait(SECONDS)
        server.tell()
        server.process.wait(SECONDS)
        second.tell("leave")


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("client(request(HELD))", signal.SIGINT),
        ("client.submit(request(HELD)).result()", signal.SIGTERM),
        ("client(request(HELD), 60.0)", signal.SIGTERM),
    ],
)
def test_a_signal_ends_a_client_that_waits_for_a_stuck_policy(
    tmp_path: Path, call: str, number: int
) -> None:
    """The user's handler runs at once, not when the reply comes."""
    source = f"""
        def handler(number, frame):
            say("handled", number)
            sys.exit(3)


        signal.signal({number}, handler)
        client = new_client(listen())
        ask(client, 1)
        {call}
        """
    policy = Doubler()
    with serving(policy) as server, programs(tmp_path, client=source) as running:
        client = running["client"]
        client.tell(str(port_of(server)))
        assert policy.computing.wait(SECONDS)
        status = psutil.Process(client.pid).status
        assert wait_until(
            lambda: {status() for _ in range(20)} == {psutil.STATUS_SLEEPING}, SECONDS
        )
        client.process.send_signal(number)
        try:
            assert client.hear("handled", timeout=SECONDS / 2)
            assert client.ending(SECONDS / 2).code == 3
        finally:
            policy.go_on.set()


@pytest.mark.parametrize("computing", [False, True])
def test_ctrl_c_ends_a_server_once_its_batch_is_done(tmp_path: Path, computing: bool) -> None:
    source = """
        policy = Doubler()
        server = new_server(policy)
        server.start()
        say("port", server.transport.address.port)
        if listen():
            assert policy.computing.wait(30)
            threading.Timer(1.0, policy.go_on.set).start()
        say("serving")
        server.serve()
        """
    with programs(tmp_path, server=source) as running:
        server = running["server"]
        client = client_at(int(server.hear("port ")[0]))
        ask(client, 1)
        future = client.submit(request(HELD)) if computing else None
        server.tell("computing" if computing else "")
        server.hear("serving")
        server.process.send_signal(signal.SIGINT)
        ending = server.ending()
        # torch imports tabulate at the exit where that is installed, and Python then forgets the interrupt
        assert ending.code in (-signal.SIGINT, 1)
        assert "KeyboardInterrupt" in ending.stderr
        assert "terminate called" not in ending.stderr
        if future is not None:
            check(future.result(SECONDS), HELD)
        with pytest.raises(Exception, match="server"):
            ask(client, 2, SECONDS)
        client.close()


def test_a_forked_child_has_a_session_of_its_own(tmp_path: Path) -> None:
    source = """
        import warnings

        warnings.simplefilter("ignore", DeprecationWarning)
        client = new_client(listen())
        for n in range(10):
            ask(client, n)
        background = client.submit(request(3))
        check(background.result(20.0), 3)  # from here on a thread receives
        for leave in (os._exit, sys.exit):
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    for n in range(100, 110):
                        ask(client, n, 20.0)
                    os.write(writer, b"served")
                except MeshInferError as error:
                    os.write(writer, f"refused: {error}".encode())
                leave(0)
            os.close(writer)
            for n in range(200, 300):
                ask(client, n, 20.0)
            say("child", os.read(reader, 1000).decode())
            _, status = os.waitpid(child, 0)
            say("status", os.waitstatus_to_exitcode(status))
            os.close(reader)
            for n in range(300, 310):
                ask(client, n, 20.0)
        client.close()
        say("done")
        """
    with serving(Doubler()) as server, programs(tmp_path, parent=source) as running:
        parent = running["parent"]
        parent.tell(str(port_of(server)))
        assert parent.hear("child ", 2) == ["served", "served"]
        assert parent.hear("status ", 2) == ["0", "0"]
        parent.hear("done")
        parent.ending().assert_clean()
        assert wait_until(lambda: server.stats().clients == 0, SECONDS)


def test_a_process_forked_from_a_serving_one_disturbs_nothing(tmp_path: Path) -> None:
    source = """
        import warnings

        warnings.simplefilter("ignore", DeprecationWarning)
        server = new_server().start()
        say("port", server.transport.address.port)
        listen()
        for leave in (os._exit, sys.exit):
            child = os.fork()
            if child == 0:
                leave(0)
            _, status = os.waitpid(child, 0)
            say("status", os.waitstatus_to_exitcode(status))
        server.serve()
        """
    with programs(tmp_path, server=source) as running:
        server = running["server"]
        client = client_at(int(server.hear("port ")[0]))
        ask(client, 1)
        server.tell()
        assert server.hear("status ", 2) == ["0", "0"]
        for n in range(10):
            ask(client, n, SECONDS)
        client.close()
        server.ending().assert_clean()
