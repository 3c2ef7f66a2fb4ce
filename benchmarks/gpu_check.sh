#!/usr/bin/env bash
# What only a machine with an NVIDIA GPU can show, on one GPU, in eight minutes and without a network.
#
# Two lanes as long as only right and wrong matter, one while times are taken, as far as the total reaches:
#
#   facts ─ package ─ cases ─ pytest ─ nccl ─┐
#           cpp ─ memcheck ─ racecheck ──────┴─ measure ─ mnist ─ bench ─ suite ─ twins
#
# A stage that fails stops no other, but without a package most cannot run.  A wrong value fails the check; figures fail
# nothing.  gpu_check/prepare.sh, on any machine, makes a kit that saves the builds here.
set -uo pipefail

readonly SCRIPT=gpu_check.sh NEEDED_GPUS=1 TOTAL_SECONDS=480
readonly STAGES=(facts package cases pytest nccl cpp memcheck racecheck measure mnist bench suite twins)
declare -A LIMIT=([facts]=15 [package]=150 [cases]=160 [pytest]=90 [nccl]=60 [cpp]=170 [memcheck]=70 [racecheck]=70
  [measure]=120 [mnist]=45 [bench]=80 [suite]=90 [twins]=60) # seconds
declare -A SHOWS=(
  [facts]="the machine"
  [package]="the package is there, and has code for the GPU"
  [cases]="the whole stack with several ranks on the GPU: late streams, freed memory, threads, graphs"
  [pytest]="kernels, collectives and training steps from Python, eager and as graphs"
  [nccl]="NCCL with one and two ranks on the GPU, without and with its own messages"
  [cpp]="every kernel computes what the CPU does"
  [memcheck]="compute-sanitizer finds no wrong access"
  [racecheck]="compute-sanitizer finds no race"
  [measure]="bandwidth, optimizers, steps and requests next to a copy, torch's fused ones and bare loops; the host's time"
  [mnist]="the reference trains by three engines"
  [bench]="times of the kernels and of a step, next to a copy's and torch's"
  [suite]="the tests that run on the CPU elsewhere"
  [twins]="the kernels in cupy, numba and plain CUDA"
)
source "$(dirname "${BASH_SOURCE[0]}")/gpu_check/common.sh"

kernels() {
  stage cpp
  stage memcheck
  stage racecheck
}

run_stages() {
  stage facts
  second_lane kernels
  stage package || has_package=no
  with_package cases pytest nccl
  wait_for_second_lane
  with_package measure mnist bench suite twins
}

main "$@"
