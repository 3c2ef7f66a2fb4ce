// One fault in each kernel, which the PTX machine must name, and kernels without a fault.  They are launched with 64
// threads; `a` and `b` have 64 elements of 4 bytes.

// Each block writes a number; the one that ends last adds them up, if fences say when they are there.
template <bool kBefore, bool kAfter>
__device__ void hand_over(unsigned* a, unsigned* b) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    a[1 + blockIdx.x] = 7;
    if (kBefore) __threadfence();
    last = atomicAdd(a, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  if (kAfter) __threadfence();
  b[threadIdx.x] = a[1] + a[2];
}

extern "C" {

__global__ void right(float* a, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) a[i] = a[i] * 2 + 1;
}
__global__ void right_shared(int* a) {
  __shared__ int s[64];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  a[threadIdx.x] = s[63 - threadIdx.x];
}
__global__ void right_shuffle(int* a) {
  int v = threadIdx.x;
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_down_sync(0xffffffff, v, offset);
  a[threadIdx.x] = v;
}
__global__ void right_half_shuffle(int* a) {
  int v = threadIdx.x;
  if (threadIdx.x % 32 < 16) v = __shfl_down_sync(0x0000ffff, v, 1, 16);
  a[threadIdx.x] = v;
}

__global__ void right_hand_over(unsigned* a, unsigned* b) { hand_over<true, true>(a, b); }
__global__ void hand_over_too_early(unsigned* a, unsigned* b) { hand_over<false, true>(a, b); }
__global__ void taken_too_early(unsigned* a, unsigned* b) { hand_over<true, false>(a, b); }

__global__ void load_out_of_bounds(float* a, float* b) { b[threadIdx.x] = a[threadIdx.x + 1]; }
__global__ void store_out_of_bounds(float* a) { a[threadIdx.x + 1] = 1; }
__global__ void misaligned_vector(float* a) { *reinterpret_cast<float4*>(a + 1) = make_float4(1, 2, 3, 4); }
__global__ void misaligned_scalar(char* a) { *reinterpret_cast<int*>(a + 2) = 1; }
__global__ void uninitialized(int* a, int* b) { b[threadIdx.x] = a[threadIdx.x]; }
__global__ void divides_by_zero(int* a, int k) { a[threadIdx.x] = 7 / (k - static_cast<int>(threadIdx.x)); }

__global__ void writes_race(int* a) { a[0] = threadIdx.x; }
__global__ void warps_race(int* a) {
  if (threadIdx.x % 32 == 0) a[0] = 1;
}
__global__ void blocks_race(int* a) {
  if (threadIdx.x == 0) a[0] = 1;
}
__global__ void reads_a_neighbour(float* a) { a[threadIdx.x] = a[threadIdx.x ^ 1]; }
__global__ void reads_another_block(int* a, int* b) {
  if (blockIdx.x == 0)
    a[threadIdx.x] = 1;
  else
    b[threadIdx.x] = a[threadIdx.x];
}

__global__ void shared_race(int* a) {
  __shared__ int s[64];
  s[threadIdx.x] = threadIdx.x;
  a[threadIdx.x] = s[63 - threadIdx.x];
}
__global__ void shared_race_in_a_loop(int* a) {
  __shared__ int s[64];
  for (int k = 0; k < 3; ++k) {
    s[threadIdx.x] = k;
    __syncthreads();
    a[threadIdx.x] += s[63 - threadIdx.x];
  }
}
__global__ void shared_uninitialized(int* a) {
  __shared__ int s[64];
  if (threadIdx.x > 0) s[threadIdx.x] = 1;
  __syncthreads();
  a[threadIdx.x] = s[63 - threadIdx.x];
}
__global__ void shared_out_of_bounds(int* a, int k) {
  __shared__ int s[64];
  s[threadIdx.x + k] = 1;
  __syncthreads();
  a[threadIdx.x] = s[threadIdx.x];
}

__global__ void divergent_barrier(int* a) {
  if (threadIdx.x < 32) {
    a[threadIdx.x] = 1;
    __syncthreads();
  } else {
    a[threadIdx.x] = 2;
    __syncthreads();
    a[threadIdx.x] += 3;
  }
}
__global__ void barrier_after_return(int* a) {
  if (threadIdx.x == 5) return;
  __syncthreads();
  a[threadIdx.x] = 1;
}
__global__ void incomplete_shuffle(int* a) {
  int v = threadIdx.x;
  if (threadIdx.x % 32 < 16) v = __shfl_down_sync(0xffffffff, v, 1);
  a[threadIdx.x] = v;
}
}
