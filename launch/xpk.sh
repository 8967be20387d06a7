#!/usr/bin/env bash
# The same run on a cluster that xpk made (https://github.com/AI-Hypercomputer/xpk), which writes the JobSet itself.
#
#     launch/xpk.sh --cluster C --workload run-a --tpu-type v5p-128 --image IMAGE [--restarts 10] [--dry-run] -- \
#         train --config configs/qwen3_30b_a3b.yaml --run-dir gs://bucket/runs/a
#
# The bucket must be attached to the cluster at /gcs/<bucket> (`xpk storage attach ... --mount-point /gcs/<bucket>`).
# Further flags of `xpk workload create` (--zone, --project, --num-slices, --priority) go before `--` as they are.
set -euo pipefail

restarts=10 dry=''
xpk=(xpk workload create)
while [[ $# -gt 0 ]]; do
  case $1 in
    --restarts) restarts=$2 && shift 2 ;;
    --image) xpk+=(--docker-image "$2") && shift 2 ;;
    --dry-run) dry=1 && shift ;;
    --) shift && break ;;
    *) xpk+=("$1") && shift ;;
  esac
done
if [[ ! ${1:-} =~ ^(train|sft|grpo|eval)$ ]]; then
  echo "xpk.sh: give flags of xpk, then -- and the command: train, sft, grpo or eval with its flags" >&2
  exit 2
fi
# 1: what the processes end with when one of them fails. xpk restarts on 127 to 255 by itself, signals among them.
xpk+=(--max-restarts "$restarts" --restart-on-exit-codes 1 --termination-grace-period-seconds 600)
xpk+=(--command "exec bash launch/worker.sh$(printf ' %q' "$@")")
if [[ -n $dry ]]; then
  printf '%q ' "${xpk[@]}"
  echo
  exit
fi
exec "${xpk[@]}"
