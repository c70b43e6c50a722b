"""The conformance suite that every inference transport passes, for anybody's transport.

::

    from meshinfer.testing import ThreadHarness, run_conformance

    run_conformance(ThreadHarness(MyTransport))

or, with a test framework, one test for each of :data:`CONFORMANCE_CHECKS`. Needs none itself.

:class:`GlooRows` has the protocol of ``DistributedTransport(backend="nccl")`` in CPU memory, where there is no GPU.
"""

from meshinfer.testing.actors import ActorPool, RayHarness
from meshinfer.testing.announced import GlooRows
from meshinfer.testing.check import ConformanceCheck
from meshinfer.testing.expect import raises
from meshinfer.testing.harness import ClientRun, ThreadHarness, TransportHarness, report
from meshinfer.testing.processes import ProcessHarness, WorkerPool
from meshinfer.testing.suite import CONFORMANCE_CHECKS, ConformanceError, run_conformance

__all__ = [
    "CONFORMANCE_CHECKS",
    "ActorPool",
    "ClientRun",
    "ConformanceCheck",
    "ConformanceError",
    "GlooRows",
    "ProcessHarness",
    "RayHarness",
    "ThreadHarness",
    "TransportHarness",
    "WorkerPool",
    "raises",
    "report",
    "run_conformance",
]
