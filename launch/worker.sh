#!/usr/bin/env bash
# One process of a job, on its own machine or in its own container; the other launchers start it everywhere.
#
#     launch/worker.sh [--dry-run] train --config configs/X.yaml --run-dir gs://bucket/runs/a [flags of trace-jax]
#
# gs:// paths are read and written through a mount: /gcs/<bucket> where it exists (GKE), else gcsfuse mounts the bucket
# under $TRACE_JAX_GCS (default ~/gcs). Use a bucket with a hierarchical namespace: a checkpoint becomes visible by one
# rename of its folder. Where the run exists already it is continued (--resume, without --init), so a launcher may start
# the same command again. The process is replaced by trace-jax: a signal to it is a signal to the run.
set -euo pipefail

dry=
if [[ ${1:-} == --dry-run ]]; then
  dry=1
  shift
fi
if [[ ! ${1:-} =~ ^(train|sft|grpo|eval)$ ]]; then
  echo "worker.sh: give train, sft, grpo or eval with its flags" >&2
  exit 2
fi

mount_bucket() { # bucket -> its folder
  local bucket=$1
  if [[ -d /gcs/$bucket ]]; then
    echo "/gcs/$bucket"
    return
  fi
  local place=${TRACE_JAX_GCS:-$HOME/gcs}/$bucket
  if [[ -z $dry ]] && ! mountpoint -q "$place"; then
    mkdir -p "$place"
    gcsfuse --implicit-dirs "$bucket" "$place" >&2
  fi
  echo "$place"
}

arguments=()
run=
previous=
for word in "$@"; do
  flag=
  if [[ $word == --*=* ]]; then
    flag=${word%%=*}=
    word=${word#*=}
  fi
  if [[ $word == gs://* ]]; then
    path=${word#gs://}
    place=$(mount_bucket "${path%%/*}")
    word=$place
    [[ $path == */* ]] && word=$place/${path#*/}
  fi
  [[ $flag == --run-dir= || $previous == --run-dir ]] && run=$word
  arguments+=("$flag$word")
  previous=$word
done
if [[ -z $run ]]; then
  echo "worker.sh: give --run-dir: all processes of a job work in one, which they all see" >&2
  exit 2
fi

if [[ -e $run/config.yaml && $1 != eval ]]; then # continue it
  kept=()
  skip=
  resumes=
  for word in "${arguments[@]}"; do
    if [[ -n $skip ]]; then
      skip=
    elif [[ $word == --init ]]; then
      skip=1
    elif [[ $word != --init=* ]]; then
      kept+=("$word")
    fi
    [[ $word == --resume ]] && resumes=1
  done
  arguments=("${kept[@]}")
  [[ -n $resumes ]] || arguments+=(--resume)
fi

# Compiled programs outlive a restart, and one process compiles for all.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$(dirname "$run")/.jax-cache}

if [[ -n $dry ]]; then
  printf 'JAX_COMPILATION_CACHE_DIR=%q trace-jax' "$JAX_COMPILATION_CACHE_DIR"
  printf ' %q' "${arguments[@]}"
  echo
  exit
fi
exec trace-jax "${arguments[@]}"
