#!/bin/bash
# Train on machines that ssh reaches without a password: one torchrun a machine. The first one is the master.
#
#     RANKS=4 INTERFACE=eth0 ssh.sh HOST1 HOST2 -- train.py --its-options
#
# RANKS is the number of ranks a machine (1), INTERFACE the network between them, MASTER the address of the first machine
# for the others (its name), PORT a port there that they reach (29400), FOLDER the folder of the program and of .venv,
# with the same path on each machine (the present one), SSH the program (ssh). If one machine fails, or after Ctrl-C, all end.
set -euo pipefail

hosts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    hosts+=("$1")
    shift
done
if [ ${#hosts[@]} -eq 0 ] || [ $# -lt 2 ]; then
    echo "usage: ssh.sh HOST… -- PROGRAM [OPTIONS…]" >&2
    exit 2
fi
shift
master=${MASTER:-${hosts[0]#*@}}

settings=(OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}")
if [ -n "${INTERFACE:-}" ]; then
    settings+=(GLOO_SOCKET_IFNAME="$INTERFACE" NCCL_SOCKET_IFNAME="$INTERFACE")
fi
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT TERM
for i in "${!hosts[@]}"; do
    words=(env "${settings[@]}" torchrun --nnodes="${#hosts[@]}" --node_rank="$i" --nproc_per_node="${RANKS:-1}")
    words+=(--master_addr="$master" --master_port="${PORT:-29400}" "$@")
    line="cd ${FOLDER:-$PWD} && PATH=\$PWD/.venv/bin:\$PATH && exec $(printf '%q ' "${words[@]}")"
    # With a terminal (-tt) the other side hangs up on its program when the connection ends.
    ${SSH:-ssh} -tt -o BatchMode=yes "${hosts[i]}" "$line" </dev/null &
done
for _ in "${hosts[@]}"; do
    wait -n # a status other than 0 ends this script, and the trap ends the others
done
