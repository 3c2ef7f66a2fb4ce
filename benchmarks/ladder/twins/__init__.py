"""Three kernels of the package again, whole, in cupy and numba: to read, to change, and to measure."""
