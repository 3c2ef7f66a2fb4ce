# Stops unless the kernels can be built for every architecture of `wanted`: their arguments need compute capability 7.0.
function(mgpu_check_archs wanted)
  foreach(arch IN LISTS wanted)
    if(arch MATCHES "^[0-9]+" AND CMAKE_MATCH_0 LESS 70)
      message(FATAL_ERROR "MGPU_CUDA_ARCHS has ${arch}: compute capability 7.0 (70) is the oldest that is supported")
    endif()
  endforeach()
endfunction()

# Sets `out` to CMAKE_CUDA_ARCHITECTURES for those of `wanted` that nvcc has; `known` is what `nvcc --list-gpu-arch` says.
# Machine code of each, and PTX, which the driver compiles for GPUs without machine code: that of the newest
# architecture for later GPUs, that of the oldest for GPUs in between (87, 110, ...).
function(mgpu_cuda_archs out wanted known)
  list(SORT wanted COMPARE NATURAL)
  set(archs "")
  set(ptx "")
  foreach(arch IN LISTS wanted)
    string(REGEX REPLACE "[af]$" "" number "${arch}")   # 90a, 100f: features of one chip or family, no PTX of them
    if(known MATCHES "compute_${number}[\r\n]")
      list(APPEND archs "${arch}-real")
      if(arch STREQUAL number)
        list(APPEND ptx "${arch}-virtual")
      endif()
    endif()
  endforeach()
  if(ptx)
    list(GET ptx 0 oldest)
    list(GET ptx -1 newest)
    list(APPEND archs ${oldest} ${newest})
    list(REMOVE_DUPLICATES archs)
  endif()
  set(${out} "${archs}" PARENT_SCOPE)
endfunction()
