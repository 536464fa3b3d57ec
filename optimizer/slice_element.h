// SPDX-License-Identifier: Apache-2.0
// optimizer/slice_element.h: the specification of every format of state: loads one element of a
// slice, applies a rule and stores the result. All of an element is read before any of it is
// written, so that elements may be done in any order, or at once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/numerics/host_device.h"
#include "base/numerics/typed_value.h"
#include "optimizer/rounding.h"
#include "optimizer/rules.h"
#include "optimizer/slice.h"

namespace ziggurat::internal {

ZIGGURAT_HOST_DEVICE inline float load_master(const Slice& slice, std::size_t i) {
  if (slice.format == StateFormat::kSplit) return joined({slice.param_in[i], slice.residual[i]});
  if (slice.format == StateFormat::kBf16) return bf16_to_float(slice.param_in[i]);
  return slice.master[i];
}

/// Loads a moment in any format but k8Bit, whose moments are blocks.
ZIGGURAT_HOST_DEVICE inline float load_moment(const Slice& slice, std::size_t moment,
                                              std::size_t i) {
  return moment_bytes(slice.format) == 2
             ? bf16_to_float(load_element<bf16>(slice.moments[moment], i))
             : load_element<float>(slice.moments[moment], i);
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
  if (slice.format == StateFormat::kSplit) slice.residual[i] = split_master(master).residual;
  if (holds_param(slice.format)) {
    slice.param_record[i] = round_with_noise(master, noise.param);
  } else {
    slice.master[i] = master;
  }
}

ZIGGURAT_HOST_DEVICE inline void store_moments(const Slice& slice, std::size_t moments,
                                               std::size_t i, const Element& element,
                                               const ElementNoise& noise) {
  for (std::size_t k = 0; k < kMomentsMax; ++k) {
    if (k == moments) return;
    if (moment_bytes(slice.format) == 2) {
      store_element(slice.moments[k], i, round_with_noise(element.moments[k], noise.moments[k]));
    } else {
      store_element(slice.moments[k], i, element.moments[k]);
    }
  }
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

/// Updates an element in every format but k8Bit.
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
  if (!param_elsewhere) {
    old.master = load_master(slice, i);
  } else if (slice.format == StateFormat::kSplit) {
    old.master = joined({.param = 0, .residual = slice.residual[i]});
  }
  old.moments[0] = load_moment(slice, 0, i);
  if (moments == 2) old.moments[1] = load_moment(slice, 1, i);
  const Element element = updated(step, slice.decay, old, 0.0f);
  store_master(slice, i, 0.0f, {});
  store_moments(slice, moments, i, element, noise);
}

/// Sets the master to the parameter, exactly; to zero if there is no parameter.
ZIGGURAT_HOST_DEVICE inline void take_master(const Slice& slice, std::size_t i, bool has_param) {
  if (holds_param(slice.format)) {
    slice.param_record[i] = has_param ? load_element<bf16>(slice.param, i) : bf16{0};
    // A bf16 value is a master whose lower half is zero.
    if (slice.format == StateFormat::kSplit) slice.residual[i] = 0;
  } else {
    slice.master[i] = has_param ? value_at(slice.param_dtype, slice.param, i) : 0.0f;
  }
}

}  // namespace ziggurat::internal
