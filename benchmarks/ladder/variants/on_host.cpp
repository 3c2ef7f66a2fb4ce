// The same on the fake CUDA runtime of the tests, where it compares bits.
#include "variants.cu"
