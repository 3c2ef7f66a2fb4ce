// A library that says it is a new NCCL and has nothing but its version.
extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int* version) {
  *version = 23007;
  return 0;
}
