// SPDX-License-Identifier: Apache-2.0
// collectives/call.cc: calls in words.
#include "collectives/call.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace ziggurat {
namespace {

const char* name(CallKind kind) {
  switch (kind) {
    case CallKind::kAllGather: return "all_gather";
    case CallKind::kReduceScatter: return "reduce_scatter";
    case CallKind::kAllReduce:
    case CallKind::kAllReduceValues: return "all_reduce";
    case CallKind::kAllToAll: return "all_to_all";
    case CallKind::kBroadcast: return "broadcast";
    case CallKind::kBarrier: return "barrier";
    case CallKind::kSend: return "send";
    case CallKind::kRecv: return "recv";
  }
  return "?";
}

const char* name(Element element) {
  switch (element) {
    case Element::kByte: return "bytes";
    case Element::kFloat32: return "fp32";
    case Element::kBFloat16: return "bf16";
    case Element::kFloat16: return "fp16";
    case Element::kFloat64: return "fp64";
    case Element::kUInt64: return "uint64";
  }
  return "?";
}

}  // namespace

Element element_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32: return Element::kFloat32;
    case DType::kBFloat16: return Element::kBFloat16;
    case DType::kFloat16: return Element::kFloat16;
  }
  return Element::kByte;
}

DType dtype_of(Element element) noexcept {
  if (element == Element::kBFloat16) return DType::kBFloat16;
  return element == Element::kFloat16 ? DType::kFloat16 : DType::kFloat32;
}

std::size_t size_bytes(Element element) noexcept {
  switch (element) {
    case Element::kByte: return 1;
    case Element::kBFloat16:
    case Element::kFloat16: return 2;
    case Element::kFloat32: return 4;
    case Element::kFloat64:
    case Element::kUInt64: return 8;
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
  std::string text = name(spec.kind);
  if (spec.kind == CallKind::kAllReduceValues) {
    constexpr const char* kOps[] = {"sum", "min", "max"};
    text += fmt::format(" ({})", spec.op < 3 ? kOps[spec.op] : "?");
  }
  if (spec.kind == CallKind::kBarrier) return text;
  text += fmt::format(" of {} {}", spec.count, name(spec.element));
  if (spec.kind == CallKind::kBroadcast) text += fmt::format(" from rank {}", spec.root);
  return text;
}

std::string describe(const CallSpec& spec, std::uint64_t sequence, std::span<const int> members) {
  return fmt::format("{} (call {} of ranks {})", describe(spec), sequence,
                     fmt::join(members, ", "));
}

}  // namespace ziggurat
