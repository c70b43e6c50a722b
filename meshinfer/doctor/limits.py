"""What the system lets this process have: descriptors, threads, memory, shared memory, processors."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

from meshinfer.doctor.cgroups import parse_cpus
from meshinfer.doctor.context import Context
from meshinfer.doctor.findings import Finding, fail, ok, warn
from meshinfer.inference.distributed.descriptors import FILES_PER_CLIENT, FILES_WHILE_JOINING
from meshinfer.memory import SharedBlock
from meshinfer.semaphore import SEMAPHORE_BYTES, Semaphore

__all__ = ["memory", "open_files", "processes", "processors", "shared_memory"]

_FILES_BESIDE = 40  # measured: 20 beside what a process has after its imports
_FILES_TO_SPARE = 64
_THREADS_PER_CLIENT = 1
_THREADS_WHILE_JOINING = 2
_THREADS_BESIDE = 8
_GIB = float(1 << 30)
_LITTLE_MEMORY = 1 << 29
_LITTLE_SHARED_MEMORY = 1 << 28
_LITTLE_ADDRESS_SPACE = 1 << 34


def open_files(context: Context) -> Finding:
    """The limit of descriptors against what a client needs, and a server of all other ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    beside = used + _FILES_BESIDE
    needed = beside + FILES_PER_CLIENT * context.clients_here
    ample = beside + _FILES_TO_SPARE
    ample += (FILES_PER_CLIENT + FILES_WHILE_JOINING) * context.num_clients
    values = {"soft": soft, "hard": hard, "used": used, "needed": needed, "ample": ample}
    text = f"limit {_limit(soft)} (hard {_limit(hard)}), {used} in use"
    remedy = f"ulimit -n {ample}"
    if _below(hard, ample):
        remedy += ", for which root must raise the hard limit,"
    remedy += " before the job starts; or spread the clients over more servers"
    if _below(soft, needed):
        return fail(f"{text}; {_who(context)} needs {needed}", remedy, **values)
    if _below(soft, ample):
        return warn(f"{text}; {_server(context)} needs up to {ample}", remedy, **values)
    if soft == resource.RLIM_INFINITY:
        return ok(text, **values)
    room = (soft - beside) // FILES_PER_CLIENT
    return ok(f"{text}; room for {room} clients of one server", **values)


def processes(context: Context) -> Finding:
    """The limits of processes and threads against what a client needs, and a server of all other ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    group = context.group.room("pids", ("pids.max",), ("pids.current",))
    rooms = [] if group is None else [group]
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:  # it does not hold for root
        rooms.append(max(0, soft - _threads_of_this_user()))
    room = min(rooms, default=None)
    needed = _THREADS_BESIDE + _THREADS_PER_CLIENT * context.clients_here
    ample = _THREADS_BESIDE
    ample += (_THREADS_PER_CLIENT + _THREADS_WHILE_JOINING) * context.num_clients
    values = {"soft": soft, "hard": hard, "control_group_room": group, "room": room}
    text = f"limit {_limit(soft)} (hard {_limit(hard)}), "
    text += "none by the control group" if group is None else f"{group} left in the control group"
    if room is None:
        return ok(text, **values, needed=needed)
    text += f"; {room} threads can be started"
    remedy = f"raise ulimit -u, or pids.max of the control group, so that {ample} can"
    if room < needed:
        return fail(f"{text}, {_who(context)} needs {needed}", remedy, **values, needed=needed)
    if room < ample:
        return warn(f"{text}, {_server(context)} up to {ample}", remedy, **values, needed=needed)
    return ok(text, **values, needed=needed)


def _server(context: Context) -> str:
    return f"a server of {_count(context.num_clients, 'client')}"


def _who(context: Context) -> str:
    return _server(context) if context.rank == 0 else "a client"


def _threads_of_this_user() -> int:
    """What the kernel counts against the limit, as far as /proc shows it."""
    total = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid == os.getuid():
                total += len(os.listdir(entry / "task"))
        except OSError:  # it has ended meanwhile
            continue
    return total


def memory(context: Context) -> Finding:
    """What is available on the host and in the control group, and the limit of the address space."""
    available = _available_memory()
    allowed = context.group.room(
        "memory",
        ("memory.max", "memory.limit_in_bytes"),
        ("memory.current", "memory.usage_in_bytes"),
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    values = {"available": available, "control_group_room": allowed, "address_space": soft}
    text = "unknown" if available is None else f"{available / _GIB:.1f} GiB available"
    text += "" if allowed is None else f", {allowed / _GIB:.1f} GiB left in the control group"
    room = min((amount for amount in (available, allowed) if amount is not None), default=None)
    if room is not None and room < _LITTLE_MEMORY:
        return warn(
            text, "ask for more memory (--mem in SLURM), or start fewer ranks here", **values
        )
    if _below(soft, _LITTLE_ADDRESS_SPACE):
        return warn(
            f"{text}, address space limited to {soft / _GIB:.1f} GiB",
            "ulimit -v unlimited: each thread reserves 8 MiB, and torch maps much that it never touches",
            **values,
        )
    return ok(text, **values)


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # hidden here
        lines = []
    for line in lines:
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    return None


def shared_memory(_: Context) -> Finding:
    """What the transports of one host use: memory without a name, with semaphores in it. And /dev/shm, for others."""
    try:
        block = SharedBlock.create(SEMAPHORE_BYTES, "a test of shared memory")
    except OSError as error:
        return fail(
            str(error.strerror), "raise the memory limit of this process or its control group"
        )
    semaphore = Semaphore(block.address, create=True)
    semaphore.post()
    if not semaphore.wait(1.0):
        return fail("a semaphore in shared memory does not count", "report the C library's version")
    most = os.sysconf("SC_SEM_NSEMS_MAX")
    works = f"anonymous memory and semaphores work (limit {_limit(most)})"
    try:
        room = os.statvfs("/dev/shm")
    except OSError as error:
        return warn(
            f"{works}; /dev/shm cannot be used: {error.strerror}",
            "mount it: multiprocessing, Ray and NCCL need it, meshinfer's own transports do not",
        )
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    text = f"{works}; /dev/shm has {free / _GIB:.2f} of {size / _GIB:.2f} GiB free"
    values = {"dev_shm_size": size, "dev_shm_free": free, "semaphores": most}
    if free < _LITTLE_SHARED_MEMORY:
        remedy = "docker run --shm-size=1g (or --ipc=host): multiprocessing, Ray and NCCL need it, meshinfer does not"
        return warn(text, remedy, **values)
    return ok(text, **values)


def processors(context: Context) -> Finding:
    """Ranks of this host times torch's threads against the processors that they may use."""
    mine = os.sched_getaffinity(0)
    quota = context.group.cpu_quota()
    usable = float(len(mine)) if quota is None else min(len(mine), quota)
    threads, here = torch.get_num_threads(), context.ranks_here
    # A rank that is bound to a part of what its job has shares that part with nobody.
    alone = mine < (context.group.cpus() or _online())
    wanted = threads * (1 if alone else here)
    values = {
        "usable": usable,
        "affinity": sorted(mine),
        "quota": quota,
        "threads": threads,
        "ranks_here": here,
        "bound": alone,
    }
    text = f"{usable:g} usable, " + ("of this rank alone, " if alone and here > 1 else "")
    text += f"for {_count(here, 'rank')} with {_count(threads, 'thread')} of torch each"
    if wanted > usable:
        return warn(
            text,
            "start fewer ranks here, set OMP_NUM_THREADS lower, or ask for more (--cpus-per-task in SLURM)",
            **values,
        )
    return ok(text, **values)


def _online() -> frozenset[int]:
    try:
        return parse_cpus(Path("/sys/devices/system/cpu/online").read_text())
    except OSError:  # hidden here
        return frozenset(range(os.cpu_count() or 1))


def _below(limit: int, needed: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < needed


def _limit(value: int) -> str:
    return "none" if value < 0 else str(value)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
