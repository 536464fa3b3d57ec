// SPDX-License-Identifier: Apache-2.0
// integrations/c/engine_calls.h: what the C functions of engines and of checkpoints share: they
// check the caller's structs. Private to the library.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "integrations/c/c_call.h"
#include "integrations/c/embedded_engine.h"

namespace ziggurat {

/// An engine that a caller has open. It keeps its runtime, which cannot be destroyed meanwhile.
struct OpenEngine {
  std::shared_ptr<Runtime> runtime;
  std::unique_ptr<EmbeddedEngine> engine;
};
/// Never destroyed, as runtimes().
Handles<OpenEngine>& engines();

/// Makes a call, `call(LentEngine&)`, of the engine that a caller names
/// (EmbeddedEngine::in_turn()).
template <class Call>
ziggurat_status on_engine(ziggurat_engine engine, const Call& call) noexcept {
  return guarded([&] {
    const std::shared_ptr<OpenEngine> open = engines().find(engine);
    open->engine->in_turn(call);
  });
}

/// Returns the parameter at a caller's index. Errors: kInvalidArgument for one that no model has.
inline ParamId param_at(std::uint64_t index) {
  if (index > std::numeric_limits<ParamId>::max())
    throw wrong(fmt::format("there is no parameter {}", index));
  return static_cast<ParamId>(index);
}

/// Returns the struct as this library knows it. Fields that an older caller does not have are zero.
template <class Struct>
Struct copied(const Struct* given, const char* what) {
  const std::uint32_t size = required(given, what)->struct_size;
  if (size < sizeof(std::uint32_t) || size > sizeof(Struct)) {
    throw wrong(fmt::format(
        "{}.struct_size is {}, but this library knows {} bytes: set it with ZIGGURAT_INIT", what,
        size, sizeof(Struct)));
  }
  Struct own{};
  std::memcpy(&own, given, size);
  return own;
}

/// Copies as much of `own` as the caller's struct holds.
template <class Struct>
void give(const Struct& own, Struct* wanted) {
  const std::uint32_t size = wanted->struct_size;
  std::memcpy(wanted, &own, size);
  wanted->struct_size = size;
}

/// Returns an array whose elements have the size with which the caller was compiled.
template <class Struct>
std::vector<Struct> array_of(const Struct* first, std::uint64_t count, const char* what) {
  std::vector<Struct> all;
  if (count == 0) return all;
  const std::uint32_t stride = required(first, what)->struct_size;
  const auto* at = reinterpret_cast<const std::byte*>(first);
  for (std::uint64_t i = 0; i < count; ++i, at += stride) {
    const auto* given = reinterpret_cast<const Struct*>(at);
    if (given->struct_size != stride)
      throw wrong(
          fmt::format("{}[{}].struct_size is {}, but that of the first element is {}: set all of "
                      "them with ZIGGURAT_INIT",
                      what, i, given->struct_size, stride));
    all.push_back(copied(given, what));
  }
  return all;
}

/// Returns memory that the caller lends. Errors: kInvalidArgument naming `what`.
TypedSpan<std::byte> memory_of(const ziggurat_memory* given, const char* what);
/// Returns `count` elements of `dtype` in a row. Errors: those of memory_of().
TypedSpan<std::byte> elements_at(void* address, ziggurat_dtype dtype, std::uint64_t count,
                                 const char* what);
/// Returns the gradient that is lent for `param`, one of many. Errors: those of elements_at(),
/// naming the parameter.
TypedSpan<const std::byte> gradient_at(const EmbeddedEngine& engine, std::uint64_t param,
                                       void* address, ziggurat_dtype dtype);

/// Returns memory in fp32. Errors: those of memory_of().
std::span<float> floats_of(const ziggurat_memory* given, const char* what);

std::vector<EmbeddedParam> params_of(const ziggurat_param* params, std::uint64_t count);
/// Copies a blob to the caller. Errors: kInvalidArgument if there is too little room.
void give_blob_bytes(std::span<const std::byte> its, void* blob, std::uint64_t capacity_bytes);

}  // namespace ziggurat
