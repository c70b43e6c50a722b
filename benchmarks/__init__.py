"""Speed of meshinfer beside its peers, every number taken on one machine in one run.

`python -m benchmarks distributed`, `local`, `actors`, `collector` and `weights` run one suite, `python -m benchmarks`
all of them, and `--quick` runs few short rounds.

    workload.py   what one client sends and how many clients there are
    suites.py     which peers meet over which transport and workload, and the goals that the numbers are held to
    policy.py     the policy that every server serves
    peers/        how each peer's server starts and how its client asks
    client.py      what a client does, wherever it runs
    conductor.py  one peer under one workload: a server and its clients, in processes, in threads or in actors
    collecting.py  a collector in place of a server and its clients
    contestant.py the harness's end of a conductor: commands, deadlines, the kill at the end
    harness.py    the rounds, interleaved
    machine.py    which machine and commit it was
    torchrl_env.py  TorchRL's own virtual environment
    report.py     table, goals, JSON
    gpu.py, gpu_parts/  the script for a machine with a GPU; a command of its own
    profile_slots.py  where the time of a request through shared memory goes; a command of its own

A new transport is one function in `peers/` and one entry in a suite.
"""
