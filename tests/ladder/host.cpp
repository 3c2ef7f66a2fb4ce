// A GPU of one thread: a launch runs at once, block by block and thread by thread. No rung has a barrier.
#include "host.h"

dim3 threadIdx, blockIdx, gridDim;

void fakeRunGrid(unsigned blocks, unsigned threads, const std::function<void()>& body) {
  gridDim = dim3(blocks);
  for (unsigned block = 0; block < blocks; ++block)
    for (unsigned thread = 0; thread < threads; ++thread) {
      blockIdx = dim3(block);
      threadIdx = dim3(thread);
      body();
    }
}

cudaError_t fakeLaunch(cudaStream_t, std::function<void()> work) {
  work();
  return cudaSuccess;
}
