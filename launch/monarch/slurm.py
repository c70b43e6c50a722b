"""The controller of a SLURM job: lends every node to itself, then runs there. See slurm.sbatch."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import several_hosts

ANNOUNCEMENT = "monarch host "


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    host = [sys.executable, str(Path(__file__).with_name("host.py"))]
    # One on each node. Their output comes here, so neither a folder nor a port has to be agreed upon.
    step = subprocess.Popen(
        ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--unbuffered", "--label", *host],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        found = [read_address(step) for _ in range(int(os.environ["SLURM_JOB_NUM_NODES"]))]
        threading.Thread(target=pass_on, args=(step.stdout,), daemon=True).start()
        several_hosts.run([address for _, address in sorted(found)], steps)
        sys.exit(step.wait(timeout=30))
    finally:
        step.terminate()
        step.wait()


def read_address(step):
    for line in step.stdout:
        task, _, text = line.partition(": ")  # as srun --label has it
        if text.startswith(ANNOUNCEMENT):
            return int(task), text.removeprefix(ANNOUNCEMENT).strip()
        print(line, end="", flush=True)
    sys.exit(f"srun has ended with code {step.wait()} before every node had told its address")


def pass_on(lines):
    for line in lines:
        print(line, end="", flush=True)


if __name__ == "__main__":
    main()
