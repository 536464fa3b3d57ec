// SPDX-License-Identifier: Apache-2.0
// optimizer/update_scalar.cc: the specification of every optimizer in every format. Other targets
// are compared with this file, bit for bit.
//
// Every line of arithmetic below is one IEEE binary32 operation, rounded to nearest even, denormals
// kept, never fused (the build says -ffp-contract=off). Changing the order of two of them changes
// the bits of every training run.
#include <cmath>
#include <cstring>
#include <span>

#include "base/numerics/float16.h"
#include "base/numerics/typed_value.h"
#include "optimizer/kernels.h"

namespace ziggurat::internal::scalar {
namespace {

struct Element {
  float master;
  float moments[kMomentsMax];
};

template <class T>
T at(const std::byte* array, std::size_t i) {
  T value;
  std::memcpy(&value, array + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void put(std::byte* array, std::size_t i, T value) {
  std::memcpy(array + i * sizeof(T), &value, sizeof(T));
}

Element adam(const OptimizerStep& step, const Element& old, float g, float decayed) {
  const float m_kept = step.beta1 * old.moments[0];
  const float m_new = step.one_minus_beta1 * g;
  const float m = m_kept + m_new;

  const float v_kept = step.beta2 * old.moments[1];
  // (1 - beta2) g first: g * g overflows from 1.8e19 on
  const float v_scaled = step.one_minus_beta2 * g;
  const float v_new = v_scaled * g;
  const float v = v_kept + v_new;

  const float root = std::sqrt(v);
  const float corrected = root * step.inv_bias2_sqrt;
  const float denominator = corrected + step.eps;
  const float direction = m / denominator;
  const float update = direction * step.step_size;
  return {decayed - update, {m, v}};
}

Element lion(const OptimizerStep& step, const Element& old, float g, float decay) {
  const float m = old.moments[0];
  const float c_kept = step.beta1 * m;
  const float c_new = step.one_minus_beta1 * g;
  const float c = c_kept + c_new;
  const float sign = c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : c;  // 0 and NaN stay
  const float update = sign * step.step_size;
  const float decayed = old.master * decay;

  const float m_kept = step.beta2 * m;
  const float m_new = step.one_minus_beta2 * g;
  return {decayed - update, {m_kept + m_new, 0.0f}};
}

Element adagrad(const OptimizerStep& step, const Element& old, float g) {
  const float square = g * g;
  const float sum = old.moments[0] + square;
  const float root = std::sqrt(sum);
  const float denominator = root + step.eps;
  const float direction = g / denominator;
  const float update = direction * step.step_size;
  return {old.master - update, {sum, 0.0f}};
}

Element sgd(const OptimizerStep& step, const Element& old, float g) {
  const float kept = step.beta1 * old.moments[0];
  const float added = step.gradient_weight * g;  // 1 leaves every g as it is
  const float momentum = kept + added;
  float direction = momentum;
  if (step.nesterov) {
    const float ahead = step.beta1 * momentum;
    direction = g + ahead;
  }
  const float update = direction * step.step_size;
  return {old.master - update, {momentum, 0.0f}};
}

Element updated(const OptimizerStep& step, float decay, const Element& old, float gradient) {
  const float g = gradient * step.grad_scale;
  switch (step.kind) {
    case OptimizerKind::kAdamW: return adam(step, old, g, old.master * decay);
    case OptimizerKind::kLion: return lion(step, old, g, decay);
    default: break;
  }
  const float penalty = old.master * decay;
  const float penalised = g + penalty;
  switch (step.kind) {
    case OptimizerKind::kAdam: return adam(step, old, penalised, old.master);
    case OptimizerKind::kAdagrad: return adagrad(step, old, penalised);
    default: return sgd(step, old, penalised);
  }
}

Element load(const Slice& slice, std::size_t moments, std::size_t i) {
  Element element{};
  switch (slice.format) {
    case StateFormat::kSplit:
      element.master = joined({slice.param_in[i], slice.residual[i]});
      break;
    case StateFormat::kBf16: element.master = bf16_to_float(slice.param_in[i]); break;
    default: element.master = slice.master[i];
  }
  for (std::size_t k = 0; k < moments; ++k) {
    element.moments[k] = moment_bytes(slice.format) == 2
                             ? bf16_to_float(at<bf16>(slice.moments[k], i))
                             : at<float>(slice.moments[k], i);
  }
  return element;
}

/// What is added before the lower half is cut off.
struct Noise {
  std::uint32_t param = kNearestNoise;
  std::uint32_t moments[kMomentsMax] = {kNearestNoise, kNearestNoise};
};

Noise noise_of(const OptimizerStep& step, const Slice& slice, std::size_t i) {
  if (step.rounding == Rounding::kNearest) return {};
  const NoiseKey key = slice.noise_key;
  const auto index = slice.in_tile + static_cast<std::uint32_t>(i);
  const std::uint32_t first = noise_bits(key, index);
  const std::uint32_t second = noise_bits({key.first, key.second + kSecondDraw}, index);
  return {first & 0xffffu, {first >> 16, second >> 16}};
}

void store(const Slice& slice, std::size_t moments, std::size_t i, const Element& element,
           const Noise& noise) {
  switch (slice.format) {
    case StateFormat::kSplit:
      slice.residual[i] = split_master(element.master).residual;
      [[fallthrough]];
    case StateFormat::kBf16:
      slice.param_record[i] = round_with_noise(element.master, noise.param);
      break;
    default: slice.master[i] = element.master;
  }
  for (std::size_t k = 0; k < moments; ++k) {
    if (moment_bytes(slice.format) == 2) {
      put(slice.moments[k], i, round_with_noise(element.moments[k], noise.moments[k]));
    } else {
      put(slice.moments[k], i, element.moments[k]);
    }
  }
  if (slice.param == nullptr) return;
  switch (slice.param_dtype) {
    case DType::kBFloat16:
      put(slice.param, i, round_with_noise(element.master, noise.param));
      break;
    case DType::kFloat16: put(slice.param, i, float_to_fp16(element.master)); break;
    case DType::kFloat32: put(slice.param, i, element.master); break;
  }
}

/// Decoded, updated as fp32 and encoded, block by block.
void update_blocks(const OptimizerStep& step, const Slice& slice, std::size_t moments) {
  for (std::size_t begin = 0; begin < slice.count; begin += kEightBitBlock) {
    const Slice codes = part_of(slice, begin, begin + kEightBitBlock);
    Slice block = codes;
    block.format = StateFormat::kFp32;
    float values[kMomentsMax][kEightBitBlock];
    const auto codes_of = [&](std::size_t k) {
      return std::span(reinterpret_cast<std::uint8_t*>(codes.moments[k]), kEightBitBlock);
    };
    for (std::size_t k = 0; k < moments; ++k) {
      scalar::decode_eight_bit(moment_code(step.kind, k), codes_of(k), codes.scales[k], values[k]);
      block.moments[k] = reinterpret_cast<std::byte*>(values[k]);
    }
    scalar::update(step, block);
    for (std::size_t k = 0; k < moments; ++k)
      scalar::encode_eight_bit(moment_code(step.kind, k), values[k], codes_of(k), codes.scales[k]);
  }
}

}  // namespace

void update(const OptimizerStep& step, const Slice& slice) {
  const std::size_t moments = moment_count(step.kind);
  if (slice.format == StateFormat::k8Bit) return update_blocks(step, slice, moments);
  for (std::size_t i = 0; i < slice.count; ++i) {
    const Element old = load(slice, moments, i);
    Element element = updated(step, slice.decay, old, value_at(slice.grad_dtype, slice.grad, i));
    element.master = quiet(element.master);
    for (float& moment : element.moments) moment = quiet(moment);
    store(slice, moments, i, element, noise_of(step, slice, i));
  }
}

}  // namespace ziggurat::internal::scalar
