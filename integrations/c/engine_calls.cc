// SPDX-License-Identifier: Apache-2.0
// integrations/c/engine_calls.cc: checks memory and parameters that a caller lends.
#include "integrations/c/engine_calls.h"

#include <utility>

namespace ziggurat {
namespace {

DType dtype_of(ziggurat_dtype dtype, const char* what) {
  switch (dtype) {
    case ZIGGURAT_FP32: return DType::kFloat32;
    case ZIGGURAT_BF16: return DType::kBFloat16;
    case ZIGGURAT_FP16: return DType::kFloat16;
    default: break;
  }
  throw wrong(fmt::format("{}.dtype is {}: give ZIGGURAT_FP32, ZIGGURAT_BF16 or ZIGGURAT_FP16",
                          what, dtype));
}

EmbeddedParam param_of(const ziggurat_param& given) {
  EmbeddedParam param;
  param.name = required(given.name, "param.name");
  if (given.dimensions > 0) {
    const std::int64_t* const shape = required(given.shape, "param.shape");
    param.shape.assign(shape, shape + given.dimensions);
  }
  param.group = given.group;
  param.unit = given.unit;
  constexpr std::uint32_t kKnown = ZIGGURAT_FROZEN | ZIGGURAT_OPTIONAL | ZIGGURAT_STREAMED;
  if ((given.flags & ~kKnown) != 0)
    throw wrong(
        fmt::format("param.flags of '{}' is {:#x}: only ZIGGURAT_FROZEN, ZIGGURAT_OPTIONAL "
                    "and ZIGGURAT_STREAMED are known",
                    param.name, given.flags));
  param.frozen = (given.flags & ZIGGURAT_FROZEN) != 0;
  param.optional = (given.flags & ZIGGURAT_OPTIONAL) != 0;
  param.streamed = given.values.address == nullptr || (given.flags & ZIGGURAT_STREAMED) != 0;
  if (given.values.address == nullptr) {
    param.values.dtype = dtype_of(copied(&given.values, "param.values").dtype, "param.values");
  } else {
    param.values = memory_of(&given.values, "param.values");
  }
  if (!param.streamed) {
    if (given.unit != 0) {
      throw wrong(
          fmt::format("parameter '{}' has a unit, but is in the caller's memory: give it no unit, "
                      "or no address",
                      param.name));
    }
    if (param.optional) {
      throw wrong(
          fmt::format("parameter '{}' is ZIGGURAT_OPTIONAL, but in the caller's memory, where it "
                      "stays: leave the flag out",
                      param.name));
    }
  }
  return param;
}

}  // namespace

Handles<OpenEngine>& engines() {
  static auto& all = *new Handles<OpenEngine>("engine");
  return all;
}

TypedSpan<std::byte> memory_of(const ziggurat_memory* given, const char* what) {
  const ziggurat_memory memory = copied(given, what);
  const DType dtype = dtype_of(memory.dtype, what);
  const std::size_t element = size_bytes(dtype);
  if (memory.size_bytes % element != 0) {
    throw wrong(fmt::format("{} has {} bytes, which is not a whole number of {} elements", what,
                            memory.size_bytes, to_string(dtype)));
  }
  return elements_at(memory.address, memory.dtype, memory.size_bytes / element, what);
}

TypedSpan<std::byte> elements_at(void* address, ziggurat_dtype dtype, std::uint64_t count,
                                 const char* what) {
  const DType its = dtype_of(dtype, what);
  const std::size_t element = size_bytes(its);
  if (address == nullptr)
    throw wrong(fmt::format("{} is null: give the address of its elements", what));
  if (reinterpret_cast<std::uintptr_t>(address) % element != 0) {
    throw wrong(fmt::format("{} is not aligned to its {} elements: give an address that {} divides",
                            what, to_string(its), element));
  }
  return {its, {static_cast<std::byte*>(address), count * element}};
}

std::span<float> floats_of(const ziggurat_memory* given, const char* what) {
  const TypedSpan<std::byte> memory = memory_of(given, what);
  if (memory.dtype != DType::kFloat32) {
    throw wrong(fmt::format("{} is in {}, but this is read and written in fp32: give fp32 memory",
                            what, to_string(memory.dtype)));
  }
  return memory.as<float>();
}

TypedSpan<const std::byte> gradient_at(const EmbeddedEngine& engine, std::uint64_t param,
                                       void* address, ziggurat_dtype dtype) {
  try {
    const std::uint64_t count = engine.count_or_none(param);
    if (count == 0) return {};  // the engine refuses the parameter later
    return elements_at(address, dtype, count, "gradient");
  } catch (const Error& error) {
    throw wrong(fmt::format("lend_gradients(parameter {} '{}'): {}", param, engine.name_of(param),
                            error.what()));
  }
}

std::vector<EmbeddedParam> params_of(const ziggurat_param* params, std::uint64_t count) {
  std::vector<EmbeddedParam> all;
  for (const ziggurat_param& param : array_of(params, count, "params"))
    all.push_back(param_of(param));
  return all;
}

void give_blob_bytes(std::span<const std::byte> its, void* blob, std::uint64_t capacity_bytes) {
  if (capacity_bytes < its.size()) {
    throw wrong(fmt::format("the blob has {} bytes, but the given memory has room for only {}",
                            its.size(), capacity_bytes));
  }
  if (!its.empty()) std::memcpy(required(blob, "blob"), its.data(), its.size());
}

}  // namespace ziggurat
