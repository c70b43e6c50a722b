"""Stands in for a rank where a launcher expects it: has the rank forked elsewhere, and ends as that ends.

Run without site packages, because it must start in milliseconds. It calls itself by the process id of the rank.
"""

import json
import os
import signal
import socket
import sys

arguments = sys.argv[1:] or ["-m", os.environ["PAR_MAIN_OVERRIDE"]]  # as a host of monarch has it
while arguments[0] == "-u":  # what a launcher adds; warm programs do not buffer their output anyhow
    del arguments[0]
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(os.environ["MESHINFER_TEST_WARM"])
request = {"command": arguments, "env": dict(os.environ), "cwd": os.getcwd()}
socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
pid = int(connection.recv(16))
with open("/proc/self/comm", "w") as name:
    name.write(str(pid))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int(connection.recv(16))
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
