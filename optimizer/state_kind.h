// SPDX-License-Identifier: Apache-2.0
// optimizer/state_kind.h: the formats of state: the name of each, and how its arrays are kept.
// Kernels can include this file, because it has nothing of what a store needs (state_format.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "optimizer/optimizers.h"

namespace ziggurat {

enum class StateFormat : std::uint8_t {
  kFp32,         ///< everything in fp32
  kBf16Moments,  ///< fp32 master, moments rounded to bf16: relative error of each at most 2^-8
  k8Bit,         ///< fp32 master, moments block-wise in 8 bits: see optimizer/eight_bit.h
  kSplit,        ///< the bits of kFp32, with the master in two halves: bf16 parameter and residual
  /// The bf16 parameter is the master; the relative error of each value is at most 2^-8. Rounding
  /// to nearest loses an update of less than 2^-9 of its parameter, and exp_avg_sq's decay from
  /// beta2 = 0.996 on. Stochastic rounding, which is the default, keeps both on average.
  kBf16,
};

/// What an array of a copy of the state consists of (state_arrays.h).
enum class StateElement : std::uint8_t { kF32, kBF16, kCode };

constexpr std::uint32_t element_bytes(StateElement element) noexcept {
  switch (element) {
    case StateElement::kF32: return 4;
    case StateElement::kBF16: return 2;
    case StateElement::kCode: return 1;
  }
  return 0;
}

/// How masters are kept. slice_element.h has the specification of each, arrays_inl.h its registers.
enum class MasterArrays : std::uint8_t {
  kFp32,
  kSplit,  ///< the bf16 parameter, and what it lacks of the fp32 master
  kBf16,   ///< the bf16 parameter
};

struct MasterInfo {
  bool holds_param;   ///< a record's first segment is the bf16 parameter itself
  bool has_residual;  ///< the second segment is what the parameter lacks of the master, in 16 bits
};

constexpr MasterInfo info_of(MasterArrays masters) noexcept {
  switch (masters) {
    case MasterArrays::kFp32: return {.holds_param = false, .has_residual = false};
    case MasterArrays::kSplit: return {.holds_param = true, .has_residual = true};
    case MasterArrays::kBf16: return {.holds_param = true, .has_residual = false};
  }
  return {};
}

/// How moments are kept.
enum class MomentArrays : std::uint8_t {
  kFp32,
  kBf16,
  kCodes,  ///< in blocks, with a scale each: see optimizer/eight_bit.h
};

struct MomentInfo {
  const char* type;  ///< in a record's format: "fp32"
  StateElement element;
};

constexpr MomentInfo info_of(MomentArrays moments) noexcept {
  switch (moments) {
    case MomentArrays::kFp32: return {"fp32", StateElement::kF32};
    case MomentArrays::kBf16: return {"bf16", StateElement::kBF16};
    case MomentArrays::kCodes: return {"8-bit", StateElement::kCode};
  }
  return {};
}

/// What all but the kernels must know of a format. Whoever has a question about a format asks it of
/// this table, so that a new one is known everywhere.
struct FormatInfo {
  const char* name;  ///< in settings: "fp32"
  MasterArrays masters;
  MomentArrays moments;
  const char* about = "";  ///< for the help, after the name
};

/// Returns the row of a format; without a name for a number that is none.
constexpr FormatInfo info_of(StateFormat format) noexcept {
  switch (format) {
    case StateFormat::kFp32: return {"fp32", MasterArrays::kFp32, MomentArrays::kFp32};
    case StateFormat::kBf16Moments:
      return {"bf16-moments", MasterArrays::kFp32, MomentArrays::kBf16};
    case StateFormat::k8Bit:
      return {"8bit", MasterArrays::kFp32, MomentArrays::kCodes, " (moments)"};
    case StateFormat::kSplit:
      return {"split", MasterArrays::kSplit, MomentArrays::kFp32,
              " (fp32's bits, fewer bytes read)"};
    case StateFormat::kBf16: return {"bf16", MasterArrays::kBf16, MomentArrays::kBf16};
  }
  return {};
}

/// How many formats there are; StateFormat counts them from 0.
inline constexpr std::size_t kStateFormatCount = [] {
  std::size_t count = 0;
  while (info_of(static_cast<StateFormat>(count)).name != nullptr) ++count;
  return count;
}();

namespace internal {

inline constexpr std::uint64_t kMasterArrays = packed<kStateFormatCount>(
    [](std::size_t i) { return info_of(static_cast<StateFormat>(i)).masters; });
inline constexpr std::uint64_t kMomentArrays = packed<kStateFormatCount>(
    [](std::size_t i) { return info_of(static_cast<StateFormat>(i)).moments; });
/// Bit 0: it holds the parameter; bit 1: it has a residual.
inline constexpr std::uint64_t kParamsHeld = packed<kStateFormatCount>([](std::size_t i) {
  const MasterInfo its = info_of(info_of(static_cast<StateFormat>(i)).masters);
  return (its.holds_param ? 1 : 0) + (its.has_residual ? 2 : 0);
});

}  // namespace internal

constexpr MasterArrays masters_of(StateFormat format) noexcept {
  return static_cast<MasterArrays>(internal::unpacked(internal::kMasterArrays, format));
}
constexpr MomentArrays moments_of(StateFormat format) noexcept {
  return static_cast<MomentArrays>(internal::unpacked(internal::kMomentArrays, format));
}

/// Returns whether a record's first segment is the bf16 parameter itself.
constexpr bool holds_param(StateFormat format) noexcept {
  return (internal::unpacked(internal::kParamsHeld, format) & 1U) != 0;
}

/// Returns whether a record's second segment is what the parameter lacks of the master.
constexpr bool has_residual(StateFormat format) noexcept {
  return (internal::unpacked(internal::kParamsHeld, format) & 2U) != 0;
}

/// Returns whether masters are rounded to bf16 at each step, because they are the parameter.
constexpr bool rounds_masters(StateFormat format) noexcept {
  return holds_param(format) && !has_residual(format);
}

/// Returns whether moments are rounded to bf16 at each step.
constexpr bool rounds_moments(StateFormat format) noexcept {
  return moments_of(format) == MomentArrays::kBf16;
}

/// Returns whether any array is kept in bf16 from step to step, so that Roundings::state applies.
/// A parameter with a residual does not count.
constexpr bool rounds_state(StateFormat format) noexcept {
  return rounds_masters(format) || rounds_moments(format);
}

/// Returns whether moments are codes in blocks, each with a scale.
constexpr bool has_codes(StateFormat format) noexcept {
  return moments_of(format) == MomentArrays::kCodes;
}

/// Returns the format with the same masters and fp32 moments, to which moments in codes are
/// decoded.
constexpr StateFormat decoded(StateFormat format) noexcept {
  for (std::size_t i = 0; i < kStateFormatCount; ++i) {
    const auto other = static_cast<StateFormat>(i);
    if (masters_of(other) == masters_of(format) && moments_of(other) == MomentArrays::kFp32)
      return other;
  }
  return format;
}

/// Returns whether a record's first segment is a parameter of `dtype`, bit for bit: a bf16
/// parameter that the record holds, or an fp32 parameter, which is its own master.
constexpr bool begins_with_param(StateFormat format, DType dtype) noexcept {
  return dtype == (holds_param(format) ? DType::kBFloat16 : DType::kFloat32);
}

/// What a store's records hold: the state of which optimizer, in which format.
struct StateKind {
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  StateFormat format = StateFormat::kFp32;
  /// Blocks of codes begin anew with each parameter of a record, and may be short: has_codes()
  /// alone (see kSharedRecordStep). A store's own kind never has it, but some of its records may.
  bool own_blocks = false;
  friend bool operator==(const StateKind&, const StateKind&) = default;
};

}  // namespace ziggurat
