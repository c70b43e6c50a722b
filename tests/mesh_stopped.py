"""A server that says where it is, and then goes on until it is killed: see test_rendezvous.py."""

from __future__ import annotations

import signal

from mesh_jobs import report
from mesh_storm import REQUEST, RESPONSE

import meshinfer

if __name__ == "__main__":
    transport = meshinfer.DistributedTransport(REQUEST, RESPONSE, secret="job")
    with meshinfer.InferenceServer(lambda batch: batch, transport):
        report("server", port=transport.address.port)
        signal.pause()
