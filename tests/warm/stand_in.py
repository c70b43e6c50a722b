"""Stands in for a rank where a launcher expects it: has the rank forked elsewhere, and ends as that ends.

Run without site packages, because it must start in milliseconds.
"""

import json
import os
import signal
import socket
import sys

arguments = sys.argv[1:]
while (
    arguments[0] == "-u"
):  # what a launcher adds; the output of warm programs is unbuffered anyhow
    del arguments[0]
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(os.environ["MESHINFER_TEST_WARM"])
request = {"command": arguments, "env": dict(os.environ), "cwd": os.getcwd()}
socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
pid = int(connection.recv(16))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int(connection.recv(16))
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
