#pragma once

#include <stdexcept>

namespace treeline {

// Errors are split by what a caller can do about them; see docs/errors.md.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The caller passed something it can fix. The message names the value and what is allowed.
struct ArgumentError : Error {
  using Error::Error;
};

// A peer failed or did not answer in time. The communicator is unusable from then on.
struct CommError : Error {
  using Error::Error;
};

// A file is not what it claims to be. The message names path, offset and what was expected.
struct FormatError : Error {
  using Error::Error;
};

// A device failed, or does not have what was asked of it.
struct DeviceError : Error {
  using Error::Error;
};

}  // namespace treeline
