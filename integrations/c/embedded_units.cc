// SPDX-License-Identifier: Apache-2.0
// integrations/c/embedded_units.cc: streamed parameters of an embedded engine, and its device.
#include <fmt/format.h>

#include <algorithm>

#include "integrations/c/embedded_engine.h"
#include "integrations/c/wrong.h"

namespace ziggurat {

void EmbeddedEngine::make_device(const std::vector<EmbeddedParam>& params,
                                 const EmbeddedConfig& config) {
  const auto streamed = std::ranges::find_if(params, &EmbeddedParam::streamed);
  if (streamed == params.end() && wholes_.empty()) {
    if (config.device_bytes == 0 && config.device == 0) return;
    throw wrong(
        fmt::format("`{}` is given, but every parameter is in the caller's memory: leave "
                    "it out, or leave the address of those parameters null that the engine "
                    "is to keep",
                    config.device == 0 ? "device_memory" : "device"));
  }
  if (config.device != 0) {
    if (config.device_bytes != 0)
      throw wrong("`device` and `device_memory` are given: give one of them");
    device_ = taken_device(config.device, runtime_);
    return;
  }
  if (config.device_bytes == 0) {
    throw wrong(fmt::format(
        "`device_memory` is missing: parameter '{}' has no address, so the engine keeps it, and "
        "needs memory for those that are acquired",
        wholes_.empty() ? streamed->name : wholes_.front().name));
  }
  device_ = std::make_shared<EmbeddedDevice>(
      runtime_, EmbeddedDevice::Memory{.size_bytes = config.device_bytes});
}

StreamRef& EmbeddedEngine::stream_of(void* handle) {
  static Host none;  // the engine says that nothing is streamed
  return device_ ? device_->stream(handle) : none;
}

TypedDeviceSpan<std::byte> EmbeddedEngine::place(std::size_t param) const {
  return engine_->place(static_cast<ParamId>(param));
}

/// Throws unless the parameter is streamed, and `values` has its type and size. Returns its unit.
StreamedUnit EmbeddedEngine::require_streamed(const char* call, std::size_t param,
                                              TypedSpan<const std::byte> values) const {
  if (whole(param) != nullptr) return require_whole(call, param, values);
  require_count(call, param, values.count());
  const UnitSpec& its = model_.units[param];
  if (!its.params[0].streamed) {
    throw wrong(fmt::format(
        "{}(parameter {} '{}'): the parameter is in the caller's memory: read and write it there",
        call, param, its.name));
  }
  if (*its.dtype != values.dtype) {
    throw wrong(fmt::format("{}(parameter {} '{}'): the parameter is {}, but the memory is {}",
                            call, param, its.name, to_string(*its.dtype), to_string(values.dtype)));
  }
  return *its.params[0].streamed;
}

/// Does the same for a whole parameter.
StreamedUnit EmbeddedEngine::require_whole(const char* call, std::size_t param,
                                           TypedSpan<const std::byte> values) const {
  const WholeParam& its = *whole(param);
  if (its.dtype == values.dtype && its.count == values.count()) return its.unit;
  throw wrong(fmt::format(
      "{}(whole parameter '{}'): the parameter has {} elements of {}, but the "
      "memory {} of {}",
      call, its.name, its.count, to_string(its.dtype), values.count(), to_string(values.dtype)));
}

void EmbeddedEngine::read_param(std::size_t param, TypedSpan<std::byte> values) {
  const StreamedUnit unit = require_streamed("read_param", param, values);
  if (is_slice(param)) return engine_->read_home(static_cast<ParamId>(param), values);
  Host host;
  engine_->acquire_aside(unit, host);
  std::exception_ptr error;
  try {
    const std::lock_guard lock(copying_);
    device_->read(place(param).bytes, values.bytes);
  } catch (...) {
    error = std::current_exception();
  }
  engine_->release(unit, host);
  if (error) std::rethrow_exception(error);
}

void EmbeddedEngine::write_param(std::size_t param, TypedSpan<const std::byte> values) {
  const StreamedUnit unit = require_streamed("write_param", param, values);
  if (is_slice(param)) {
    in_turn([&](LentEngine& engine) {
      engine.write_home(static_cast<ParamId>(param), values);
      written_[param] = param < trained_;
    });
    return;
  }
  Host host;
  engine_->acquire_aside(unit, host);
  std::exception_ptr error;
  try {
    const std::lock_guard lock(copying_);
    device_->write(place(param).bytes, values.bytes);
    param_written(param);
  } catch (...) {
    error = std::current_exception();
  }
  engine_->release(unit, host);
  if (error) std::rethrow_exception(error);
}

}  // namespace ziggurat
