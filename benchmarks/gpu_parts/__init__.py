"""The parts of `benchmarks.gpu`, each of which runs in a process of its own, and what they share.

part.py         one part in its process: settings, findings, deadlines; the table of parts
load.py         servers and clients that keep them busy
versions.py, trace.py, overhead.py, nccl.py (nccl_client.py), staging.py, compiled.py, conformance.py  the parts
wheel.py        a newer NCCL out of pieces of its wheel
report.py       tables, goals
"""
