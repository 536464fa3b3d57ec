// SPDX-License-Identifier: Apache-2.0
// optimizer/slice_element.h: the specification of every format of state: loads one element of a
// slice, applies a rule and stores the result. All of an element is read before any of it is
// written, so that elements may be done in any order, or at once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/numerics/host_device.h"
#include "base/numerics/typed_value.h"
#include "optimizer/optimizers.h"
#include "optimizer/rounding.h"
#include "optimizer/slice.h"

namespace ziggurat::internal {

/// How an element of each kind of masters is kept: loads it; loads what the record has of it where
/// the trainer has no parameter, which counts as zero; and stores it, with the noise of a
/// parameter.
template <MasterArrays>
struct MasterElement;

template <>
struct MasterElement<MasterArrays::kFp32> {
  ZIGGURAT_HOST_DEVICE static float load(const Slice& slice, std::size_t i) {
    return slice.master[i];
  }
  ZIGGURAT_HOST_DEVICE static float load_padding(const Slice& slice, std::size_t i) {
    return slice.master[i];
  }
  ZIGGURAT_HOST_DEVICE static void store(const Slice& slice, std::size_t i, float master,
                                         std::uint32_t) {
    slice.master[i] = master;
  }
};

template <>
struct MasterElement<MasterArrays::kSplit> {
  ZIGGURAT_HOST_DEVICE static float load(const Slice& slice, std::size_t i) {
    return joined({slice.param_in[i], slice.residual[i]});
  }
  ZIGGURAT_HOST_DEVICE static float load_padding(const Slice& slice, std::size_t i) {
    return joined({.param = 0, .residual = slice.residual[i]});
  }
  ZIGGURAT_HOST_DEVICE static void store(const Slice& slice, std::size_t i, float master,
                                         std::uint32_t noise) {
    slice.residual[i] = split_master(master).residual;
    slice.param_record[i] = round_with_noise(master, noise);
  }
};

template <>
struct MasterElement<MasterArrays::kBf16> {
  ZIGGURAT_HOST_DEVICE static float load(const Slice& slice, std::size_t i) {
    return bf16_to_float(slice.param_in[i]);
  }
  ZIGGURAT_HOST_DEVICE static float load_padding(const Slice&, std::size_t) { return 0.0f; }
  ZIGGURAT_HOST_DEVICE static void store(const Slice& slice, std::size_t i, float master,
                                         std::uint32_t noise) {
    slice.param_record[i] = round_with_noise(master, noise);
  }
};

/// Calls `with` with the MasterElement of masters kept like this.
template <class With>
ZIGGURAT_HOST_DEVICE inline auto with_masters(MasterArrays masters, const With& with) {
  switch (masters) {
    case MasterArrays::kFp32: return with(MasterElement<MasterArrays::kFp32>());
    case MasterArrays::kSplit: return with(MasterElement<MasterArrays::kSplit>());
    case MasterArrays::kBf16: return with(MasterElement<MasterArrays::kBf16>());
  }
  __builtin_unreachable();
}

/// How an element of each kind of moments is kept; codes are kept in blocks.
template <MomentArrays>
struct MomentElement;

template <>
struct MomentElement<MomentArrays::kFp32> {
  ZIGGURAT_HOST_DEVICE static float load(const std::byte* moments, std::size_t i) {
    return load_element<float>(moments, i);
  }
  ZIGGURAT_HOST_DEVICE static void store(std::byte* moments, std::size_t i, float value,
                                         std::uint32_t) {
    store_element(moments, i, value);
  }
};

template <>
struct MomentElement<MomentArrays::kBf16> {
  ZIGGURAT_HOST_DEVICE static float load(const std::byte* moments, std::size_t i) {
    return bf16_to_float(load_element<bf16>(moments, i));
  }
  ZIGGURAT_HOST_DEVICE static void store(std::byte* moments, std::size_t i, float value,
                                         std::uint32_t noise) {
    store_element(moments, i, round_with_noise(value, noise));
  }
};

/// Calls `with` with the MomentElement of moments kept like this, which must not be codes.
template <class With>
ZIGGURAT_HOST_DEVICE inline auto with_moments(MomentArrays moments, const With& with) {
  switch (moments) {
    case MomentArrays::kFp32: return with(MomentElement<MomentArrays::kFp32>());
    case MomentArrays::kBf16: return with(MomentElement<MomentArrays::kBf16>());
    case MomentArrays::kCodes: break;
  }
  __builtin_unreachable();
}

ZIGGURAT_HOST_DEVICE inline float load_master(const Slice& slice, std::size_t i) {
  return with_masters(masters_of(slice.format),
                      [&](auto element) { return element.load(slice, i); });
}

/// Loads a moment in any format without codes, whose moments are blocks.
ZIGGURAT_HOST_DEVICE inline float load_moment(const Slice& slice, std::size_t moment,
                                              std::size_t i) {
  return with_moments(moments_of(slice.format),
                      [&](auto element) { return element.load(slice.moments[moment], i); });
}

ZIGGURAT_HOST_DEVICE inline Element load(const Slice& slice, std::size_t moments, std::size_t i) {
  Element element{};
  element.master = load_master(slice, i);
  element.moments[0] = load_moment(slice, 0, i);
  if (moments == 2) element.moments[1] = load_moment(slice, 1, i);
  return element;
}

/// The bits that are added before the lower half is cut off.
struct ElementNoise {
  std::uint32_t param = kNearestNoise;
  std::uint32_t moments[kMomentsMax] = {kNearestNoise, kNearestNoise};
};

/// Returns the noise of the element with that index under that key.
constexpr ElementNoise noise_of(Drawn drawn, NoiseKey key, std::uint32_t index) {
  ElementNoise noise;
  if (!drawn.param && !drawn.moments) return noise;
  const std::uint32_t first = noise_bits(key, index);
  if (drawn.param) noise.param = first & 0xffffu;
  if (!drawn.moments) return noise;
  noise.moments[0] = first >> 16;
  noise.moments[1] = drawn.param ? noise_bits({key.first, key.second + kSecondDraw}, index) >> 16
                                 : first & 0xffffu;
  return noise;
}

ZIGGURAT_HOST_DEVICE inline void store_master(const Slice& slice, std::size_t i, float master,
                                              const ElementNoise& noise) {
  with_masters(masters_of(slice.format),
               [&](auto element) { element.store(slice, i, master, noise.param); });
}

ZIGGURAT_HOST_DEVICE inline void store_moments(const Slice& slice, std::size_t moments,
                                               std::size_t i, const Element& element,
                                               const ElementNoise& noise) {
  with_moments(moments_of(slice.format), [&](auto kept) {
    for (std::size_t k = 0; k < kMomentsMax; ++k) {
      if (k == moments) return;
      kept.store(slice.moments[k], i, element.moments[k], noise.moments[k]);
    }
  });
}

/// Stores the parameter; does nothing if the slice has none.
ZIGGURAT_HOST_DEVICE inline void store_param(const Slice& slice, std::size_t i, float master,
                                             const ElementNoise& noise) {
  if (slice.param == nullptr) return;
  if (slice.param_dtype == DType::kBFloat16) {
    store_element(slice.param, i, round_with_noise(master, noise.param));
  } else {
    store_value(slice.param_dtype, slice.param, i, master);
  }
}

/// Updates an element in every format without codes.
ZIGGURAT_HOST_DEVICE inline void update_element(const OptimizerStep& step, const Slice& slice,
                                                std::size_t i, const ElementNoise& noise) {
  const std::size_t moments = moment_count(step.kind);
  const Element old = load(slice, moments, i);
  const Element element =
      updated(step, slice.decay, old, value_at(slice.grad_dtype, slice.grad, i));
  store_master(slice, i, element.master, noise);
  store_moments(slice, moments, i, element, noise);
  store_param(slice, i, element.master, noise);
}

/// Updates an element past the trainer's last, in the same formats. Its gradient is zero, and so is
/// its parameter if it is read from the trainer; its master becomes zero.
ZIGGURAT_HOST_DEVICE inline void update_padding(const OptimizerStep& step, const Slice& slice,
                                                std::size_t i, const ElementNoise& noise) {
  const std::size_t moments = moment_count(step.kind);
  const bool param_elsewhere = holds_param(slice.format) && slice.param_in != slice.param_record;
  Element old{};
  old.master = with_masters(masters_of(slice.format), [&](auto element) {
    return param_elsewhere ? element.load_padding(slice, i) : element.load(slice, i);
  });
  old.moments[0] = load_moment(slice, 0, i);
  if (moments == 2) old.moments[1] = load_moment(slice, 1, i);
  const Element element = updated(step, slice.decay, old, 0.0f);
  store_master(slice, i, 0.0f, {});
  store_moments(slice, moments, i, element, noise);
}

/// Sets the master to the parameter, exactly; to zero if there is no parameter.
ZIGGURAT_HOST_DEVICE inline void take_master(const Slice& slice, std::size_t i, bool has_param) {
  store_master(slice, i, has_param ? value_at(slice.param_dtype, slice.param, i) : 0.0f, {});
}

}  // namespace ziggurat::internal
