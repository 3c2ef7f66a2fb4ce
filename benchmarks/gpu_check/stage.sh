#!/usr/bin/env bash
# One stage of gpu_check.sh or gpu_check_many.sh, which run it under its time limit: `bash stage.sh STAGE OUTDIR WORK`,
# in the root of a clone. It prints its log; the exit status is 0, 5 if something that it needs is not there, or another if it failed.
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
backends = {name: (built, detail) for name, built, detail in _core.backends()}
print(backends, _core.cuda_device_count())
assert backends["cuda"][0] and _core.cuda_device_count() > 0, "the cuda backend is not built, or sees no GPU"
'
}

# A run in which everything was skipped proves nothing. Behind the summary a library may say something at its end.
run_pytest() {
  local junit=$1
  python3 -P -c 'import pytest' || missing pytest
  shift
  python3 -P -m pytest -q -p no:cacheprovider -m "" --junitxml="$out/$junit.xml" "$@" 2>&1 | tee "$out/$junit.txt"
  local code=${PIPESTATUS[0]}
  [[ $code == 0 ]] && ! tail -n 20 "$out/$junit.txt" | grep -q "[1-9][0-9]* passed" && code=1 && echo "no test passed"
  rm -f "$out/$junit.txt"
  return "$code"
}

# The kernels first, then what is made of them. What needs no GPU was proved without one.
stage_test() {
  local code=0 first=(tests/cuda/test_kernels.py tests/cuda/test_collectives.py tests/cuda/test_train_step.py)
  [[ -d tests/cuda ]] || missing tests/cuda
  run_pytest test-cuda "${first[@]}" tests/cuda --ignore=tests/cuda/test_nccl.py || code=1
  if [[ $code != 0 ]]; then
    echo "== once more, with torch's own account of a capture that failed"
    TORCH_SHOW_CPP_STACKTRACES=1 run_pytest test-captured tests/cuda/test_train_step.py -k captured
  fi
  run_pytest test-kernels tests/kernels tests/ladder -k gpu || code=1
  exit "$code"
}

# Only the first program runs under compute-sanitizer: the edges (every dtype, alignment and table size) take too long there.
stage_sanitize() {
  local failed=() programs=$work/cpp/tests/cpp name tool
  command -v cmake || missing cmake
  cmake -S . -B "$work/cpp" -G Ninja -DMGPU_PYTHON=OFF -DMGPU_TESTS=ON -DMGPU_CUDA=on -DMGPU_CUDA_ARCHS=native || exit 1
  for name in test_cuda_kernels_gpu test_cuda_kernel_edges_gpu; do
    echo "== plain: $name"
    cmake --build "$work/cpp" --target "$name" && "$programs/$name" || failed+=("$name")
  done
  if command -v compute-sanitizer; then
    for tool in memcheck racecheck; do
      echo "== $tool: test_cuda_kernels_gpu"
      compute-sanitizer --tool "$tool" --error-exitcode 9 "$programs/test_cuda_kernels_gpu" || failed+=("$tool")
    done
  elif [[ ${#failed[@]} == 0 ]]; then
    missing compute-sanitizer
  fi
  [[ ${#failed[@]} == 0 ]] && exit 0
  echo "failed: ${failed[*]}" # last, because the summary shows the end of this log
  exit 1
}

# The tests start their own processes, and give them what several ranks on one GPU need of this NCCL. NCCL's messages and
# Python's buffers change what a process prints and when, and must change no result.
stage_nccl() {
  local code=0
  [[ -f tests/cuda/test_nccl.py ]] || missing tests/cuda/test_nccl.py
  run_pytest test-nccl tests/cuda/test_nccl.py || code=1
  NCCL_DEBUG=WARN PYTHONUNBUFFERED=1 run_pytest test-nccl-warn tests/cuda/test_nccl.py || code=1
  exit "$code"
}

# One process for all cases; it begins no case when most of the limit has passed.
stage_bench() {
  mkdir -p "$out/results"
  python3 -P benchmarks/gpu_check/bench.py "$out/results" --seconds $((GPU_CHECK_LIMIT * 3 / 4))
}

many() {
  python3 -P benchmarks/gpu_check/many.py "$@"
}

stage_probe() { many probe; }
stage_contexts() { many contexts; }
stage_replicas() {
  local code=0 algorithm
  for algorithm in direct ring nccl; do
    many replicas --algorithm "$algorithm" || code=1
  done
  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True many replicas --algorithm direct || code=1
  exit "$code"
}
stage_graphs() { run_pytest test-graphs tests/cuda/test_train_step.py -k graphs_of_several_gpus; }
stage_streams() { NCCL_P2P_DISABLE=1 many streams; }
stage_abort() {
  local code=0 signal
  for signal in STOP KILL; do
    many abort --signal "$signal" || code=1
  done
  exit "$code"
}

"stage_$1"
