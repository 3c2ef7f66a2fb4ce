// Two families of errors.  InvalidArgument is the caller's mistake, thrown before anything is written; it becomes
// Python's ValueError.  Error and its children are the machine's; each becomes the Python class of the same name.
#pragma once

#include <stdexcept>
#include <string>

namespace mgpu {

class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A backend that this build does not have, or that this machine cannot run.
class BackendUnavailable : public Error {
 public:
  using Error::Error;
};

// A call into CUDA or NCCL that failed; `code` is the library's own number.
class CodedError : public Error {
 public:
  CodedError(const std::string& message, int code) : Error(message), code(code) {}
  const int code;
};
class CudaError : public CodedError {
 public:
  using CodedError::CodedError;
};
class NcclError : public CodedError {
 public:
  using CodedError::CodedError;
};

// A check that stays in release builds: it guards against the caller, not against us.
inline void require(bool holds, const std::string& message) {
  if (!holds) throw InvalidArgument(message);
}

}  // namespace mgpu
