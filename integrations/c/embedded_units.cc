// SPDX-License-Identifier: Apache-2.0
// integrations/c/embedded_units.cc: streamed parameters of an embedded engine. Its device is memory
// of the host.
#include <fmt/format.h>

#include <algorithm>

#include "integrations/c/embedded_engine.h"
#include "integrations/c/wrong.h"

namespace ziggurat {

void EmbeddedEngine::make_device(const std::vector<EmbeddedParam>& params,
                                 const EmbeddedConfig& config) {
  if (std::ranges::none_of(params, &EmbeddedParam::streamed)) {
    if (config.device_bytes == 0) return;
    throw wrong(
        "`device_memory` is given, but every parameter is in the caller's memory: leave it out, or "
        "leave the address of those parameters null that the engine is to keep");
  }
  if (config.device_bytes == 0) {
    throw wrong(fmt::format(
        "`device_memory` is missing: parameter '{}' has no address, so the engine keeps it, and "
        "needs memory for those that are acquired",
        std::ranges::find_if(params, &EmbeddedParam::streamed)->name));
  }
  device_ = HostDevice::create(runtime_.reactor, config.device_bytes);
}

/// Returns where a streamed parameter is while its unit is acquired.
TypedSpan<std::byte> EmbeddedEngine::place(std::size_t param) const {
  const TypedDeviceSpan<std::byte> its = engine_->place(static_cast<ParamId>(param));
  return {its.dtype, HostDevice::view(its.bytes)};
}

/// Throws unless the parameter is streamed, and `values` has its type and size. Returns its unit.
StreamedUnit EmbeddedEngine::require_streamed(const char* call, std::size_t param,
                                              TypedSpan<const std::byte> values) const {
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

void EmbeddedEngine::read_param(std::size_t param, TypedSpan<std::byte> values) {
  const StreamedUnit unit = require_streamed("read_param", param, values);
  Host host;
  engine_->acquire(unit, host);
  {
    const std::lock_guard lock(copying_);
    std::ranges::copy(place(param).bytes, values.bytes.begin());
  }
  engine_->release(unit, host);
}

void EmbeddedEngine::write_param(std::size_t param, TypedSpan<const std::byte> values) {
  const StreamedUnit unit = require_streamed("write_param", param, values);
  Host host;
  engine_->acquire(unit, host);
  std::exception_ptr error;
  try {
    const std::lock_guard lock(copying_);
    std::ranges::copy(values.bytes, place(param).bytes.begin());
    param_written(param);
  } catch (...) {
    error = std::current_exception();
  }
  engine_->release(unit, host);
  if (error) std::rethrow_exception(error);
}

}  // namespace ziggurat
