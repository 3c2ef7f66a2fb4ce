#!/usr/bin/env bash
# What only a machine with two or more NVIDIA GPUs can show, in about ten minutes and without a network: which GPUs reach
# each other, whether replicas stay equal, results without peer-to-peer, and how a team ends when one of its processes stops.
#
# Run gpu_check.sh first. Arguments, output and exit status are the same.
set -uo pipefail

readonly SCRIPT=gpu_check_many.sh NEEDED_GPUS=2 TOTAL_SECONDS=660
readonly STAGES=(facts package probe contexts replicas streams abort)
declare -A LIMIT=([facts]=15 [package]=150 [probe]=90 [contexts]=40 [replicas]=180 [streams]=60 [abort]=120) # seconds
declare -A SHOWS=(
  [facts]="the machine"
  [package]="the package is there, and has code for the GPUs"
  [probe]="which GPUs reach each other's memory, and how fast"
  [contexts]="work on the second GPU alone takes no memory of the first"
  [replicas]="1,000 steps each with direct, ring, nccl and expandable segments: all replicas hold the same bits"
  [streams]="without peer-to-peer and on streams other than the default ones, results are the same"
  [abort]="a process that is stopped or killed ends its team with an error, in time"
)
source "$(dirname "${BASH_SOURCE[0]}")/gpu_check/common.sh"

run_stages() {
  stage facts
  stage package || has_package=no
  with_package probe contexts replicas streams abort
}

main "$@"
