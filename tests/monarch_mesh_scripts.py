"""Controllers with a monarch mesh, as programs of their own: ``monarch_mesh_scripts.py NAME [ARGUMENT ...]``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from meshinfer.monarch_settings import apply_monarch_settings

apply_monarch_settings()

import monarch.actor  # noqa: E402
from monarch.actor import Actor, endpoint, shutdown_context, this_host  # noqa: E402

from meshinfer.mesh.monarch import MonarchMesh  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 60.0


class Elsewhere(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


def survive(folder: str) -> None:
    import monarch_mesh_roles as roles

    heard: list[str] = []
    monarch.actor.unhandled_fault_hook = lambda failure: heard.append(failure.mesh_name)
    with MonarchMesh(groups={"server": 1, "env": 2}) as mesh:
        server = mesh.serve(roles.Scale, "monarch")
        envs = mesh.spawn("env", "envs", roles.Env, server)
        for future in envs.call("ask", 1.0):
            future.get(timeout=SECONDS)
        for group, rank in (("env", 1), ("server", 0)):
            os.kill(mesh.pids(group)[rank], signal.SIGKILL)
            lost = mesh.next_failure(SECONDS)
            print("lost", lost.group, lost.rank, flush=True)
        procs = this_host().spawn_procs(per_host={"procs": 1}, name="elsewhere")
        pid = procs.spawn("elsewhere", Elsewhere).pid.call_one().get(timeout=SECONDS)
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + SECONDS
        while not heard and time.monotonic() < deadline:
            time.sleep(0.05)
        print("hook:", heard[0].rpartition("-")[0], flush=True)
        # it asks until the mesh is closed, and finds nobody
        envs[0].ask_until_error.call_one(0, str(Path(folder) / "note"))
    print("closed", flush=True)
    monarch.actor.unhandled_fault_hook = lambda failure: print("late:", failure.report())
    time.sleep(2.0)
    print("survived", flush=True)


def wait() -> None:
    with MonarchMesh(groups={"env": 1}) as mesh:
        print("pids", *mesh.pids("env"), flush=True)
        time.sleep(300.0)


def spmd() -> None:
    from monarch.spmd import SPMDActor

    procs = this_host().spawn_procs(per_host={"procs": 2}, name="spmd")
    ranks = procs.spawn("spmd", SPMDActor)
    host, port = ranks.slice(procs=0).get_host_port.call_one(None).get(timeout=SECONDS)
    example = str(ROOT / "examples" / "serve_cartpole.py")
    ranks.main.call(host, port, [example, "--steps=20"]).get(timeout=2 * SECONDS)
    procs.stop().get(timeout=SECONDS)
    shutdown_context(host_timeout=1.0).get(timeout=SECONDS)


if __name__ == "__main__":
    {"survive": survive, "wait": wait, "spmd": spmd}[sys.argv[1]](*sys.argv[2:])
