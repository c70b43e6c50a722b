#!/bin/sh
# All ranks on this host: RANKS=4 launch/torchrun/one_node.sh script.py [argument ...]
# With RESTARTS=3 all ranks start again, three times at most, when one of them fails.
set -eu
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# --standalone: torchrun's own store is at a port that the system chooses, so that two jobs never meet.
exec python -m torch.distributed.run --standalone --nproc-per-node="${RANKS:-4}" --max-restarts="${RESTARTS:-0}" "$@"
