#!/usr/bin/env bash
# What only a machine with an NVIDIA GPU can show, in nine minutes and without a network: the kernels compute right and are
# clean under compute-sanitizer, the package's tests and NCCL run, and how long the kernels take.
#
# Everything is written into OUTDIR as it comes: STAGE.log, status (a line per stage), doctor.json, results/CASE.json,
# and summary.md, one page that is there whatever happens. What is built stays in GPU_CHECK_WORK, so that a later call
# may leave `build` out. A wrong value fails the check; a missed bound is reported and fails nothing.
set -uo pipefail

readonly SCRIPT=gpu_check.sh NEEDED_GPUS=1
# In this order: what the later stages rely on comes first.
readonly STAGES=(build sanitize test nccl bench)
declare -A LIMIT=([build]=110 [sanitize]=100 [test]=110 [nccl]=80 [bench]=120) # seconds; with the facts 540
declare -A SHOWS=(
  [build]="the package builds, and sees the GPU"
  [sanitize]="every kernel computes what the CPU does; memcheck and racecheck find nothing"
  [test]="kernels, collectives and training steps from Python, eager and as graphs"
  [nccl]="NCCL with one and two ranks on the GPU, without and with its own messages"
  [bench]="times of the kernels and of a step, next to a copy's and torch's"
)
source "$(dirname "${BASH_SOURCE[0]}")/gpu_check/common.sh"
main "$@"
