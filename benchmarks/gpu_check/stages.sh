#!/usr/bin/env bash
# One stage of gpu_check.sh or gpu_check_many.sh, which run it under its time limit: `bash stages.sh STAGE`, in the root of
# a clone. It prints its log. Exit status: 0; 5 something that it needs is not there; 6 it needs a GPU, and this is a dry
# run; another: it failed.
set -uo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
work=$GPU_CHECK_WORK kit=$GPU_CHECK_KIT device=$GPU_CHECK_DEVICE chosen_wheel=${MGPU_WHEEL:-}
pip=(python3 -m pip install --quiet --no-index --no-deps --target "$work/site")

missing() {
  echo "missing: $*"
  exit 5
}

needs_gpu() {
  [[ $device != cpu ]] || { echo "needs a GPU" && exit 6; }
}

stage_facts() {
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem --format=csv,noheader
  echo "python: $(python3 --version)"
  echo "nvcc: $(nvcc --version 2> /dev/null | grep release || echo none)"
  python3 -P -c '
import importlib.metadata as metadata
for name in ("torch", "nvidia-nccl-cu13", "triton", "pytest", "pytest-xdist", "pybind11", "scikit-build-core"):
    try:
        print(f"{name}: {metadata.version(name)}")
    except metadata.PackageNotFoundError:
        print(f"{name}: none")
'
  for tool in cmake ninja g++ compute-sanitizer ncu cuobjdump; do command -v "$tool" || echo "no $tool"; done
  nproc && uname -r && df -h "${TMPDIR:-/tmp}" | tail -n 1
  command -v free > /dev/null && free -g | sed -n 2p
  return 0
}

# A build without CUDA, or one for another GPU, would let the tests pass by torch's own copies.
is_usable() {
  python3 -P "$here/usable.py" "$device"
}

stage_package() {
  local wheel
  rm -rf "$work/site"
  if [[ $chosen_wheel == installed ]]; then
    is_usable
    return
  elif [[ -n $chosen_wheel ]]; then
    [[ -f $chosen_wheel ]] || missing "MGPU_WHEEL=$chosen_wheel"
    "${pip[@]}" "$chosen_wheel" && is_usable
    return
  fi
  for wheel in "$kit"/*.whl; do
    [[ -f $wheel ]] && "${pip[@]}" "$wheel" && is_usable && return
    echo "the kit's wheel does not work here, or there is none: $wheel"
    rm -rf "$work/site"
  done
  MGPU_CUDA=on MGPU_CUDA_ARCHS=native "${pip[@]}" --no-build-isolation . && is_usable
}

# Every case in a process of its own, so that a hang or a crash costs that case alone; in a dry run every file.
stage_cases() {
  python3 -P "$here/cases.py" "$work/cases.jsonl" --seconds $((GPU_CHECK_LIMIT - 5)) \
    ${GPU_CHECK_CASES:+-k "$GPU_CHECK_CASES"} $([[ $device != cpu ]] || echo --by file)
}

# if_there MODULE WORDS: the words, where Python has the module.
if_there() { python3 -P -c "import $1" 2> /dev/null && printf "%s " "${@:2}"; }

# A run in which everything was skipped proves nothing.
run_pytest() {
  python3 -P -c 'import pytest' || missing pytest
  local code log
  log=$(mktemp "$work/pytest.XXXX")
  python3 -P -m pytest -q -p no:cacheprovider -m "" $(if_there pytest_timeout --timeout=50) "$@" 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  if [[ $code == 0 && $device != cpu ]] && ! tail -n 20 "$log" | grep -q "[1-9][0-9]* passed"; then
    echo "no test passed"
    code=1
  fi
  return "$code"
}

stage_pytest() {
  run_pytest $(if_there xdist -n 4) tests/cuda --ignore=tests/cuda/test_nccl.py --ignore=tests/cuda/one_gpu
}

# The tests start their own processes, and give them what several ranks on one GPU need of this NCCL. NCCL's messages
# change what a process prints and when, and must change no result.
stage_nccl() {
  local code=0
  run_pytest tests/cuda/test_nccl.py || code=1
  NCCL_DEBUG=WARN run_pytest tests/cuda/test_nccl.py -k "two_ranks or every_collective" || code=1
  return "$code"
}

# The kit's programs if they start here, otherwise a build.
stage_cpp() {
  local name failed=() programs=$work/cpp/tests/cpp names=(test_cuda_kernels_gpu test_cuda_kernel_edges_gpu)
  needs_gpu
  mkdir -p "$programs"
  if [[ -x $kit/cpp/${names[0]} ]] && ! ldd "$kit/cpp/${names[0]}" 2>&1 | grep 'not found'; then
    cp "${names[@]/#/$kit/cpp/}" "$programs/"
  else
    command -v cmake || missing cmake
    cmake -S . -B "$work/cpp" -G Ninja -DMGPU_PYTHON=OFF -DMGPU_TESTS=ON -DMGPU_CUDA=on -DMGPU_CUDA_ARCHS=native &&
      cmake --build "$work/cpp" --target "${names[@]}" || return 1
  fi
  for name in "${names[@]}"; do
    echo "== $name"
    "$programs/$name" || failed+=("$name")
  done
  [[ ${#failed[@]} == 0 ]] || { echo "failed: ${failed[*]}" && return 1; }
}

# Only the first program: the edges (every dtype, alignment and table size) take too long there.
sanitized() {
  needs_gpu
  [[ -x $work/cpp/tests/cpp/test_cuda_kernels_gpu ]] || missing "the program of stage cpp"
  command -v compute-sanitizer || missing compute-sanitizer
  compute-sanitizer --tool "$1" --print-limit 20 --error-exitcode 9 "$work/cpp/tests/cpp/test_cuda_kernels_gpu"
}
stage_memcheck() { sanitized memcheck; }
stage_racecheck() { sanitized racecheck; }

stage_measure() {
  python3 -P "$here/measure.py" "$work/measure.json" --device "$device" --seconds $((GPU_CHECK_LIMIT * 3 / 4))
}

stage_mnist() {
  local way code=0 ways=("plain --device-ids 0" "step --device-ids 0" "step --device-ids 0,0"
    "drop-in --device-ids 0,0")
  [[ $device != cpu ]] || ways=("step --device-ids cpu,cpu")
  for way in "${ways[@]}"; do
    # shellcheck disable=SC2086  # a way is several words
    if python3 -P -m mgpu_core mnist --engine $way --epochs 2 > "$work/mnist.out" 2>&1; then
      echo "figure: mnist $way: $(tail -n 1 "$work/mnist.out")"
    else
      echo "FAILED mnist $way: $(tail -n 1 "$work/mnist.out")"
      code=1
    fi
  done
  return "$code"
}

# The project's own cases, of whose files the table of GPU figures in docs/gpu.md is made; one process for all of them.
stage_bench() {
  needs_gpu
  mkdir -p "$work/logs/results"
  python3 -P "$here/bench.py" "$work/logs/results" --seconds $((GPU_CHECK_LIMIT * 3 / 4))
}

# The tests that run on the CPU everywhere, where the default devices are GPUs.
stage_suite() {
  needs_gpu
  run_pytest $(if_there xdist -n 12) --maxfail=25 -m "not (slow or processes or soak or fakes or browser)" \
    tests/step tests/data_parallel tests/inference tests/pipeline tests/data tests/comm
}

# The kernels' twins in cupy, numba and plain CUDA, where these are installed.
stage_twins() {
  needs_gpu
  run_pytest $(if_there xdist -n 8) tests/kernels tests/benchmarks/test_kernel_cases.py tests/ladder -k gpu
}

many() {
  needs_gpu
  python3 -P "$here/many.py" "$@"
}
stage_probe() { many probe; }
stage_contexts() { many contexts; }
stage_replicas() {
  local code=0 algorithm
  for algorithm in direct ring nccl; do
    many replicas --algorithm "$algorithm" || code=1
  done
  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True many replicas --algorithm direct || code=1
  return "$code"
}
stage_streams() { NCCL_P2P_DISABLE=1 many streams; }
stage_abort() {
  local code=0 signal
  for signal in STOP KILL; do
    many abort --signal "$signal" || code=1
  done
  return "$code"
}

"stage_$1"
