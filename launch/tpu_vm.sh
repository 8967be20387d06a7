#!/usr/bin/env bash
# A training command, or eval, on every machine of a TPU pod slice (gcloud), from your own machine.
#
#     launch/tpu_vm.sh --name pod --zone us-east5-a [--project P] [--restarts 3] [--folder trace-jax] [--dry-run] -- \
#         train --config configs/qwen3_30b_a3b.yaml --run-dir gs://bucket/runs/a
#
# Each machine needs this repository in ~/<folder>, installed with the extra `tpu` into ~/<folder>/.venv, and gcsfuse for
# gs:// paths: see BUILD.md. Ctrl-C and SIGTERM go on to all machines, where the run saves and ends. A failure is tried
# again from the last checkpoint, at most --restarts times.
set -euo pipefail

name='' zone='' project='' restarts=0 folder=trace-jax dry=''
while [[ $# -gt 0 ]]; do
  case $1 in
    --name) name=$2 && shift 2 ;;
    --zone) zone=$2 && shift 2 ;;
    --project) project=$2 && shift 2 ;;
    --restarts) restarts=$2 && shift 2 ;;
    --folder) folder=$2 && shift 2 ;;
    --dry-run) dry=1 && shift ;;
    --) shift && break ;;
    *) echo "tpu_vm.sh: unknown flag $1" >&2 && exit 2 ;;
  esac
done
if [[ -z $name || -z $zone || $# -eq 0 ]]; then
  echo "tpu_vm.sh: give --name and --zone of the slice, then -- and the command: train, sft, grpo or eval with its flags" >&2
  exit 2
fi

everywhere() { # a command line -> runs it on all machines of the slice
  local gcloud=(gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker all)
  [[ -z $project ]] || gcloud+=(--project "$project")
  gcloud+=(--command "$1")
  if [[ -n $dry ]]; then
    printf '%q ' "${gcloud[@]}"
    echo
    return
  fi
  "${gcloud[@]}"
}

# The shell leaves its process id behind and becomes the run, so that a signal finds it.
pid=.trace-jax.pid
signal_all() { everywhere "kill -$1 \$(cat ~/$pid) 2> /dev/null || true"; }
start="cd ~/$(printf %q "$folder") && . .venv/bin/activate && echo \$\$ > ~/$pid && TRACE_JAX_DISTRIBUTED=1 exec bash launch/worker.sh$(printf ' %q' "$@")"

asked=
# shellcheck disable=SC2317,SC2329 # the trap calls it
forward() {
  asked=1
  signal_all TERM
}
trap forward TERM INT

for ((attempt = 0; ; attempt++)); do
  status=0
  (
    trap '' INT # a terminal's Ctrl-C is for this script, which passes it on
    everywhere "$start"
  ) &
  job=$!
  while wait "$job" || status=$?; kill -0 "$job" 2> /dev/null; do status=0; done
  [[ -z $dry && $status -ne 0 && $status -ne 2 && -z $asked && $attempt -lt $restarts ]] || break
  echo "tpu_vm.sh: restart $((attempt + 1)) of $restarts" >&2
  signal_all KILL # of a machine that lost its connection
  sleep 10
done
if [[ -n $dry ]]; then
  echo "# on SIGTERM and Ctrl-C:"
  signal_all TERM
fi
exit "$status"
