// SPDX-License-Identifier: Apache-2.0
// collectives/call.cc: calls in words.
#include "collectives/call.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>

namespace ziggurat {
namespace {

const char* name(CallElement element) {
  switch (element) {
    case CallElement::kByte: return "bytes";
    case CallElement::kFloat32: return "fp32";
    case CallElement::kBFloat16: return "bf16";
    case CallElement::kFloat16: return "fp16";
    case CallElement::kFloat64: return "fp64";
    case CallElement::kUInt64: return "uint64";
  }
  return "?";
}

}  // namespace

const char* name_of(CallKind kind) noexcept {
  switch (kind) {
    case CallKind::kAllGather: return "all_gather";
    case CallKind::kReduceScatter: return "reduce_scatter";
    case CallKind::kAllReduce:
    case CallKind::kAllReduceValues: return "all_reduce";
    case CallKind::kAllToAll: return "all_to_all";
    case CallKind::kBarrier: return "barrier";
    case CallKind::kSend: return "send";
    case CallKind::kRecv: return "recv";
  }
  return "?";
}

CallElement element_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32: return CallElement::kFloat32;
    case DType::kBFloat16: return CallElement::kBFloat16;
    case DType::kFloat16: return CallElement::kFloat16;
  }
  return CallElement::kByte;
}

DType dtype_of(CallElement element) noexcept {
  if (element == CallElement::kBFloat16) return DType::kBFloat16;
  return element == CallElement::kFloat16 ? DType::kFloat16 : DType::kFloat32;
}

std::size_t size_bytes(CallElement element) noexcept {
  switch (element) {
    case CallElement::kByte: return 1;
    case CallElement::kBFloat16:
    case CallElement::kFloat16: return 2;
    case CallElement::kFloat32: return 4;
    case CallElement::kFloat64:
    case CallElement::kUInt64: return 8;
  }
  return 1;
}

bool CallSpec::meets(const CallSpec& other) const noexcept {
  CallSpec mirrored = other;
  if (other.kind == CallKind::kSend) mirrored.kind = CallKind::kRecv;
  if (other.kind == CallKind::kRecv) mirrored.kind = CallKind::kSend;
  return *this == mirrored;
}

std::string describe(const CallSpec& spec) {
  std::string text = name_of(spec.kind);
  if (spec.kind == CallKind::kAllReduceValues) {
    constexpr const char* kOps[] = {"sum", "min", "max"};
    text += fmt::format(" ({})", spec.op < 3 ? kOps[spec.op] : "?");
  }
  if (spec.kind == CallKind::kBarrier) return text;
  return text + fmt::format(" of {} {}", spec.count, name(spec.element));
}

std::string describe(const CallSpec& spec, std::uint64_t sequence, std::span<const int> members) {
  return fmt::format("{} (call {} of ranks {})", describe(spec), sequence,
                     fmt::join(members, ", "));
}

}  // namespace ziggurat
