// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/warps.cc: control flow, barriers, shuffles and votes; PTX ISA 9.7.9.6 and
// 9.7.12 to 9.7.13.
#include "tests/cuda_double/ptx/warps.h"

#include <fmt/format.h>

#include <algorithm>

#include "tests/cuda_double/ptx/handlers.h"

namespace ziggurat::cuda_double::ptx {
namespace {

After branch(Thread& thread, const Instruction& i) {
  thread.pc = i.target;
  return After::kGoOn;
}
After leave(Thread&, const Instruction&) { return After::kExit; }
After nothing(Thread&, const Instruction&) { return After::kGoOn; }
After trap(Thread&, const Instruction&) {
  throw Fault(cudaErrorLaunchFailure, "the kernel trapped");
}
After wait_for_block(Thread& thread, const Instruction&) {
  thread.state = Thread::State::kAtBarrier;
  return After::kWait;
}
After wait_for_warp(Thread& thread, const Instruction&) {
  thread.state = Thread::State::kInWarp;
  return After::kWait;
}

// What do_together() finds in an instruction's detail.
enum class Together : std::uint8_t {
  kSync,
  kUp,
  kDown,
  kButterfly,
  kIndex,
  kAll,
  kAny,
  kUniform,
  kBallot,
  kAdd,
  kMin,
  kMax,
  kAnd,
  kOr,
  kXor,
  kMinSigned,
  kMaxSigned
};

/// shfl: the lane that a lane reads, and whether it is in bounds.
struct Source {
  std::uint32_t lane;
  bool in_bounds;
};

Source source_of(const Thread& thread, const Instruction& i) {
  const int lane = static_cast<int>(thread.lane());
  const int b = static_cast<int>(get<std::uint32_t>(thread, i.s[1]) & 0x1f);
  const auto c = get<std::uint32_t>(thread, i.s[2]);
  const int clamp = static_cast<int>(c & 0x1f);
  const int segment = static_cast<int>(c >> 8 & 0x1f);
  const int least = lane & segment;
  const int most = least | (clamp & ~segment);
  int from = lane;
  bool in_bounds = true;
  switch (static_cast<Together>(i.detail)) {
    case Together::kUp:
      from = lane - b;
      in_bounds = from >= most;
      break;
    case Together::kDown:
      from = lane + b;
      in_bounds = from <= most;
      break;
    case Together::kButterfly:
      from = lane ^ b;
      in_bounds = from <= most;
      break;
    default:
      from = least | (b & ~segment);
      in_bounds = from <= most;
      break;
  }
  return {static_cast<std::uint32_t>(in_bounds ? from : lane), in_bounds};
}

void shuffle(std::span<Thread* const, kWarp> lanes) {
  std::uint32_t values[kWarp] = {};
  Source sources[kWarp] = {};
  for (std::uint32_t lane = 0; lane < kWarp; ++lane) {
    if (lanes[lane] == nullptr) continue;
    const Instruction& i = *lanes[lane]->waits_at;
    values[lane] = get<std::uint32_t>(*lanes[lane], i.s[0]);
    sources[lane] = source_of(*lanes[lane], i);
  }
  for (std::uint32_t lane = 0; lane < kWarp; ++lane) {
    Thread* thread = lanes[lane];
    if (thread == nullptr) continue;
    if (lanes[sources[lane].lane] == nullptr) {
      throw Fault(cudaErrorLaunchFailure,
                  fmt::format("lane {} shuffles from lane {}, which takes no part: its value is "
                              "undefined",
                              lane, sources[lane].lane));
    }
    put(*thread, thread->waits_at->d[0], values[sources[lane].lane]);
    put(*thread, thread->waits_at->d[1], sources[lane].in_bounds);
  }
}

void vote(std::span<Thread* const, kWarp> lanes, Together kind) {
  std::uint32_t ballot = 0;
  std::uint32_t members = 0;
  for (std::uint32_t lane = 0; lane < kWarp; ++lane) {
    if (lanes[lane] == nullptr) continue;
    const Instruction& i = *lanes[lane]->waits_at;
    members |= 1u << lane;
    // The detail's neighbour says whether the predicate is negated.
    if (get<bool>(*lanes[lane], i.s[0]) != (i.detail2 != 0)) ballot |= 1u << lane;
  }
  for (Thread* thread : lanes) {
    if (thread == nullptr) continue;
    const Operand& d = thread->waits_at->d[0];
    switch (kind) {
      case Together::kAll: put(*thread, d, ballot == members); break;
      case Together::kAny: put(*thread, d, ballot != 0); break;
      case Together::kUniform: put(*thread, d, ballot == 0 || ballot == members); break;
      default: put(*thread, d, ballot); break;
    }
  }
}

std::uint32_t reduced(Together kind, std::uint32_t a, std::uint32_t b) {
  const auto sa = static_cast<std::int32_t>(a);
  const auto sb = static_cast<std::int32_t>(b);
  switch (kind) {
    case Together::kAdd: return a + b;
    case Together::kMin: return std::min(a, b);
    case Together::kMax: return std::max(a, b);
    case Together::kAnd: return a & b;
    case Together::kOr: return a | b;
    case Together::kXor: return a ^ b;
    case Together::kMinSigned: return static_cast<std::uint32_t>(std::min(sa, sb));
    default: return static_cast<std::uint32_t>(std::max(sa, sb));
  }
}

void reduce(std::span<Thread* const, kWarp> lanes, Together kind) {
  std::optional<std::uint32_t> result;
  for (Thread* thread : lanes) {
    if (thread == nullptr) continue;
    const auto value = get<std::uint32_t>(*thread, thread->waits_at->s[0]);
    result = result ? reduced(kind, *result, value) : value;
  }
  for (Thread* thread : lanes) {
    if (thread != nullptr) put(*thread, thread->waits_at->d[0], *result);
  }
}

template <std::size_t kCount>
std::optional<Together> named(const Opcode& opcode, const char* const (&names)[kCount],
                              Together first) {
  for (std::size_t n = 0; n < kCount; ++n) {
    if (opcode.has(names[n])) {
      return static_cast<Together>(static_cast<std::size_t>(first) + n);
    }
  }
  return std::nullopt;
}

std::optional<Together> together(const Opcode& opcode) {
  constexpr const char* kShuffles[] = {"up", "down", "bfly", "idx"};
  constexpr const char* kVotes[] = {"all", "any", "uni", "ballot"};
  constexpr const char* kReductions[] = {"add", "min", "max", "and", "or", "xor"};
  const std::string& base = opcode.base();
  if (!opcode.has("sync")) return std::nullopt;
  if (base == "bar" && opcode.has("warp")) return Together::kSync;
  if (base == "shfl" && opcode.type() == "b32") return named(opcode, kShuffles, Together::kUp);
  if (base == "vote") return named(opcode, kVotes, Together::kAll);
  if (base != "redux") return std::nullopt;
  const auto kind = named(opcode, kReductions, Together::kAdd);
  if (opcode.type() == "s32" && kind == Together::kMin) return Together::kMinSigned;
  if (opcode.type() == "s32" && kind == Together::kMax) return Together::kMaxSigned;
  return kind;
}

}  // namespace

std::uint32_t members_of(const Thread& thread) {
  const Instruction& i = *thread.waits_at;
  // The mask is the last operand: of bar.warp the only one, of shfl the fourth.
  switch (static_cast<Together>(i.detail)) {
    case Together::kSync: return get<std::uint32_t>(thread, i.d[0]);
    case Together::kUp:
    case Together::kDown:
    case Together::kButterfly:
    case Together::kIndex: return get<std::uint32_t>(thread, i.s[3]);
    default: return get<std::uint32_t>(thread, i.s[1]);
  }
}

void do_together(std::span<Thread* const, kWarp> lanes) {
  const auto first =
      std::find_if(lanes.begin(), lanes.end(), [](Thread* t) { return t != nullptr; });
  const auto kind = static_cast<Together>((*first)->waits_at->detail);
  if (kind >= Together::kUp && kind <= Together::kIndex) shuffle(lanes);
  if (kind >= Together::kAll && kind <= Together::kBallot) vote(lanes, kind);
  if (kind >= Together::kAdd) reduce(lanes, kind);
}

Handler control_handler(const Opcode& opcode, Instruction& instruction) {
  const std::string& base = opcode.base();
  if (base == "bra") return &branch;
  if (base == "ret" || base == "exit") return &leave;
  if (base == "trap") return &trap;
  // One thread runs at a time, so memory has one order.
  if (base == "membar" || base == "fence") {
    instruction.is_fence = !opcode.has("cta");
    return &nothing;
  }
  if (base == "nanosleep" || base == "pragma") {
    return &nothing;
  }
  if (const auto kind = together(opcode)) {
    instruction.detail = static_cast<std::uint8_t>(*kind);
    return &wait_for_warp;
  }
  const bool block = base == "bar" || base == "barrier";
  if (block && opcode.has("sync") && !opcode.has("warp") && !opcode.has("cluster") &&
      instruction.s[0].reg < 0 && instruction.count == 1) {
    return &wait_for_block;
  }
  return nullptr;
}

}  // namespace ziggurat::cuda_double::ptx
