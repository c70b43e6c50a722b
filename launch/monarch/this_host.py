"""One server and three env ranks on this host: python launch/monarch/this_host.py"""

import sys

import cartpole

if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    cartpole.run(None, {"server": 1, "env": 3}, steps=steps)
