#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <system_error>

#include "treeline/c_api.h"
#include "treeline/errors.h"

namespace treeline::c_api {

// Keeps `message`, cut to what fits, for treeline_last_error(). Returns `status`.
treeline_status Fail(treeline_status status, const char* message) noexcept;

// Runs body() and turns whatever it throws into a status: nothing leaves by another way.
template <class Body>
treeline_status Guard(const Body& body) noexcept {
  try {
    body();
    return TREELINE_OK;
  } catch (const ArgumentError& e) {
    return Fail(TREELINE_ERROR_ARGUMENT, e.what());
  } catch (const CommError& e) {
    return Fail(TREELINE_ERROR_COMM, e.what());
  } catch (const FormatError& e) {
    return Fail(TREELINE_ERROR_FORMAT, e.what());
  } catch (const DeviceError& e) {
    return Fail(TREELINE_ERROR_DEVICE, e.what());
  } catch (const std::system_error& e) {  // no more threads, for one
    return Fail(TREELINE_ERROR_DEVICE, e.what());
  } catch (const std::bad_alloc&) {
    return Fail(TREELINE_ERROR_MEMORY, "out of memory");
  } catch (const std::length_error&) {  // more than a container can hold
    return Fail(TREELINE_ERROR_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    return Fail(TREELINE_ERROR_INTERNAL, e.what());
  } catch (...) {
    return Fail(TREELINE_ERROR_INTERNAL, "unknown exception");
  }
}

}  // namespace treeline::c_api
