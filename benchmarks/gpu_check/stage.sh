#!/usr/bin/env bash
# One stage of gpu_check.sh, which runs it under its time limit: `bash stage.sh STAGE OUTDIR WORK`, in the root of a clone.
# It prints its log; the exit status is 0, 5 if something that it needs is not there, or another if it failed.
set -uo pipefail
out=$2 work=$3

missing() {
  echo "missing: $*"
  exit 5
}

stage_build() {
  rm -rf "$work/site"
  local pip=(python3 -m pip install --no-index --no-deps --target "$work/site")
  if [[ -n ${MGPU_WHEEL:-} ]]; then
    [[ -f $MGPU_WHEEL ]] || missing "MGPU_WHEEL=$MGPU_WHEEL"
    "${pip[@]}" "$MGPU_WHEEL" || exit 1
  else
    MGPU_CUDA=on MGPU_CUDA_ARCHS=native "${pip[@]}" --no-build-isolation . || exit 1
  fi
  # A build without CUDA, or one for another driver, would let the tests pass by torch's own copies.
  python3 -P -c '
from mgpu_core import _core
rooms = {name: (built, detail) for name, built, detail in _core.rooms()}
print(rooms, _core.cuda_device_count())
assert rooms["cuda"][0] and _core.cuda_device_count() > 0, "the cuda room is not built, or sees no GPU"
'
}

# A run in which everything was skipped proves nothing. Behind the summary a library may say something at its end.
run_pytest() {
  local junit=$1
  shift
  python3 -P -m pytest -q -p no:cacheprovider --junitxml="$out/$junit.xml" "$@" 2>&1 | tee "$out/$junit.txt"
  local code=${PIPESTATUS[0]}
  [[ $code == 0 ]] && ! tail -n 20 "$out/$junit.txt" | grep -q "[1-9][0-9]* passed" && code=1 && echo "no test passed"
  rm -f "$out/$junit.txt"
  return "$code"
}

stage_test() {
  local code=0
  [[ -d tests/cuda ]] || missing tests/cuda
  run_pytest test-cuda tests/cuda --ignore=tests/cuda/test_nccl.py || code=1
  # What needs no GPU was proved without one.
  run_pytest test-kernels tests/kernels tests/ladder -k gpu || code=1
  exit "$code"
}

stage_sanitize() {
  local code=0 program=$work/cpp/tests/cpp/test_cuda_kernels_gpu tool
  command -v cmake || missing cmake
  cmake -S . -B "$work/cpp" -G Ninja -DMGPU_PYTHON=OFF -DMGPU_TESTS=ON -DMGPU_CUDA=on -DMGPU_CUDA_ARCHS=native &&
    cmake --build "$work/cpp" --target test_cuda_kernels_gpu || exit 1
  echo "== plain"
  "$program" || exit 1
  command -v compute-sanitizer || missing compute-sanitizer
  for tool in memcheck racecheck; do
    echo "== $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$program" || code=1
  done
  exit "$code"
}

# The tests start their own processes, and give them what several ranks on one GPU need of this NCCL.
stage_nccl() {
  [[ -f tests/cuda/test_nccl.py ]] || missing tests/cuda/test_nccl.py
  NCCL_DEBUG=${NCCL_DEBUG:-WARN} run_pytest test-nccl tests/cuda/test_nccl.py
}

stage_bench() {
  local code=0 name
  mkdir -p "$out/results"
  echo "== train_step"
  python3 -P benchmarks/run.py train_step --device cuda --peers bare,torch,compile --model simplenet --check \
    --json "$out/results/train_step.json" || code=1
  for name in pack unpack sum_ranks scale_cast l2_norm sgd adamw; do
    echo "== $name"
    python3 -P benchmarks/run.py "$name" --device cuda --check --json "$out/results/$name.json" || code=1
  done
  echo "== ladder"
  python3 -P benchmarks/ladder/run.py --json "$out/results/ladder.json" || code=1
  exit "$code"
}

"stage_$1"
