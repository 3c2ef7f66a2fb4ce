#!/usr/bin/env bash
# On any machine, before a run on a machine with a GPU: builds what would be built there, into .gpu_check/ in the clone.
#
#   bash benchmarks/gpu_check/prepare.sh [PYTHON]
#
# PYTHON (default: python3.12) is of the version that the GPU machine has; GPU_CHECK_ARCHS (default: 90, Hopper) are its
# architectures. It makes a wheel, the C++ programs of the kernels, and a note of the commit. .gpu_check/ is ignored by
# git: take it along with the clone. On two cores it takes some minutes.
set -euo pipefail
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
kit=$root/.gpu_check build=${TMPDIR:-/tmp}/mgpu-gpu-check-build-$(id -u) archs=${GPU_CHECK_ARCHS:-90} python=${1:-}
cd "$root"

# A pyenv's python3.12 may refuse to run.
for each in ${python:-python3.12 "$HOME"/.pyenv/versions/3.12*/bin/python}; do
  "$each" -c 'pass' 2> /dev/null && python=$each && break
done
[[ -n $python ]] || { echo "prepare.sh: no Python 3.12 here; name another: prepare.sh PYTHON" >&2 && exit 2; }

rm -rf "$kit" && mkdir -p "$kit/cpp" "$build"
git describe --always --dirty --exclude '*' > "$kit/commit"
"$python" -m venv --clear "$build/venv"
export PATH=$build/venv/bin:$PATH MGPU_CUDA=on MGPU_CUDA_ARCHS=$archs
pip install --quiet --disable-pip-version-check 'scikit-build-core>=0.10' 'pybind11>=3' cmake ninja
command -v nvcc > /dev/null || pip install --quiet --disable-pip-version-check 'cuda-toolkit[nvcc,cccl]==13.0.*'
python -m pip wheel --quiet --no-deps --no-build-isolation -w "$kit" .
cmake -S . -B "$build/cpp" -G Ninja -DMGPU_PYTHON=OFF -DMGPU_TESTS=ON -DMGPU_CUDA=on "-DMGPU_CUDA_ARCHS=$archs" \
  "-DPython_EXECUTABLE=$build/venv/bin/python" > "$build/configure.log" || { cat "$build/configure.log" && exit 1; }
cmake --build "$build/cpp" --target test_cuda_kernels_gpu test_cuda_kernel_edges_gpu kernel_variants_gpu
strip -o "$kit/cpp/kernel_variants" "$build/cpp/tests/cpp/kernel_variants_gpu"
for name in test_cuda_kernels_gpu test_cuda_kernel_edges_gpu; do
  strip -o "$kit/cpp/$name" "$build/cpp/tests/cpp/$name"
done
du -sh "$kit"/* "$kit"/cpp/*
echo "ready: in a copy of this clone with .gpu_check/ on the GPU machine, bash benchmarks/gpu_check.sh OUTDIR"
