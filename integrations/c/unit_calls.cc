// SPDX-License-Identifier: Apache-2.0
// integrations/c/unit_calls.cc: the C functions of streamed parameters.
#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <vector>

#include "integrations/c/c_call.h"
#include "integrations/c/engine_calls.h"

namespace {

using ziggurat::copied;
using ziggurat::DType;
using ziggurat::engines;
using ziggurat::give;
using ziggurat::guarded;
using ziggurat::memory_of;
using ziggurat::OpenEngine;
using ziggurat::param_at;
using ziggurat::required;

ziggurat_dtype dtype_in_c(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return ZIGGURAT_FP16;
    case DType::kBFloat16: return ZIGGURAT_BF16;
    case DType::kFloat32: break;
  }
  return ZIGGURAT_FP32;
}

}  // namespace

ziggurat_status ziggurat_acquire(ziggurat_engine engine, uint32_t unit, void* stream) {
  return guarded([&] {
    const std::shared_ptr<OpenEngine> open = engines().find(engine);
    open->engine->lent().acquire(unit, open->engine->stream_of(stream));
  });
}

ziggurat_status ziggurat_acquire_aside(ziggurat_engine engine, uint32_t unit, void* stream) {
  return guarded([&] {
    const std::shared_ptr<OpenEngine> open = engines().find(engine);
    open->engine->lent().acquire_aside(unit, open->engine->stream_of(stream));
  });
}

ziggurat_status ziggurat_release(ziggurat_engine engine, uint32_t unit, void* stream) {
  return guarded([&] {
    const std::shared_ptr<OpenEngine> open = engines().find(engine);
    open->engine->lent().release(unit, open->engine->stream_of(stream));
  });
}

ziggurat_status ziggurat_expect_units(ziggurat_engine engine, const uint32_t* units,
                                      uint64_t count) {
  return guarded([&] {
    const std::shared_ptr<OpenEngine> open = engines().find(engine);
    if (count > 0) open->engine->lent().expect_units({required(units, "units"), count});
  });
}

ziggurat_status ziggurat_param_memory(ziggurat_engine engine, uint64_t param,
                                      ziggurat_memory* place) {
  return guarded([&] {
    const std::shared_ptr<OpenEngine> open = engines().find(engine);
    ziggurat_memory own = copied(place, "place");
    const auto its = open->engine->lent().place(param_at(param));
    own.dtype = dtype_in_c(its.dtype);
    own.address = reinterpret_cast<void*>(its.bytes.address());
    own.size_bytes = its.bytes.size();
    give(own, place);
  });
}

ziggurat_status ziggurat_param_addresses(ziggurat_engine engine, uint64_t count,
                                         const uint64_t* params, void** addresses) {
  return guarded([&] {
    const std::shared_ptr<OpenEngine> open = engines().find(engine);
    if (count == 0) return;
    required(addresses, "addresses");
    std::vector<void*> found;
    found.reserve(count);
    for (const uint64_t param : std::span(required(params, "params"), count))
      found.push_back(
          reinterpret_cast<void*>(open->engine->lent().place(param_at(param)).bytes.address()));
    std::copy(found.begin(), found.end(), addresses);
  });
}

ziggurat_status ziggurat_read_param(ziggurat_engine engine, uint64_t param,
                                    const ziggurat_memory* values) {
  return guarded(
      [&] { engines().find(engine)->engine->read_param(param, memory_of(values, "values")); });
}

ziggurat_status ziggurat_write_param(ziggurat_engine engine, uint64_t param,
                                     const ziggurat_memory* values) {
  return guarded(
      [&] { engines().find(engine)->engine->write_param(param, memory_of(values, "values")); });
}

ziggurat_status ziggurat_read_gradient(ziggurat_engine engine, uint64_t param,
                                       const ziggurat_memory* values, int32_t* has_gradient) {
  return guarded([&] {
    const std::shared_ptr<OpenEngine> open = engines().find(engine);
    required(has_gradient, "has_gradient");
    *has_gradient =
        open->engine->read_gradient(param, ziggurat::floats_of(values, "values")) ? 1 : 0;
  });
}
