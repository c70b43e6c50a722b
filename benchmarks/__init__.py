"""Speed of meshinfer beside its peers, every number taken on one machine in one run.

`python -m benchmarks` runs everything; `python -m benchmarks --quick` takes under a minute.

    workload.py   what one client sends and how many clients there are
    suites.py     which peers meet over which workload, and the goals that the numbers are held to
    policy.py     the policy that every server serves
    peers/        one file per peer: how its server starts and how its client asks
    conductor.py  one peer under one workload: a server process and its client processes
    contestant.py the harness's end of a conductor: commands, deadlines, the kill at the end
    harness.py    the rounds, interleaved
    machine.py    which machine and commit it was
    torchrl_env.py  TorchRL's own virtual environment
    report.py     table, goals, JSON

A new transport is one file in `peers/` and one entry in a suite.
"""
