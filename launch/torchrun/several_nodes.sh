#!/bin/sh
# Run it on each of the nodes, in any order; without a scheduler, for that there is launch/slurm:
#   export HEAD=node0 PORT=29400 NODES=2 RANKS=4 MESHINFER_SECRET=...    the same on every node
#   NODE=0 launch/torchrun/several_nodes.sh script.py [argument ...]     on HEAD; elsewhere NODE=1, NODE=2 ...
# With RESTARTS=3 all ranks, on every node, start again, three times at most, when one of them fails.
set -eu
: "${HEAD:?a name or address of the first node that all nodes know}"
: "${PORT:?a port of HEAD that nothing uses}"
: "${NODES:?how many nodes there are}"
: "${NODE:?0 on HEAD, 1 to NODES - 1 on the others}"
: "${MESHINFER_SECRET:?of this job, made once: python -c 'import secrets; print(secrets.token_hex())'}"
export MESHINFER_SECRET OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# is_host: HEAD opens the port or fails. Left to guess, torchrun joins whatever job has that port.
exec python -m torch.distributed.run --nnodes="$NODES" --nproc-per-node="${RANKS:-4}" \
    --rdzv-backend=c10d --rdzv-endpoint="$HEAD:$PORT" --rdzv-id="$HEAD:$PORT" \
    --rdzv-conf="is_host=$([ "$NODE" = 0 ] && echo 1 || echo 0)" --max-restarts="${RESTARTS:-0}" "$@"
