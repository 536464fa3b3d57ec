// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/vocabulary_inl.h: the kernels of kernels.h for the two ends of the model:
// symbols to vectors, and logits to a loss, for the whole vocabulary or a rank's range of it.
// Included once per SIMD target.
#include <cstdint>

#include "hwy/highway.h"
#include "integrations/gpt/kernels.h"
#include "integrations/gpt/kernels_inl.h"
#include "integrations/gpt/lanes_inl.h"
#include "integrations/gpt/random.h"

#if defined(ZIGGURAT_GPT_VOCABULARY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZIGGURAT_GPT_VOCABULARY_INL_H_
#undef ZIGGURAT_GPT_VOCABULARY_INL_H_
#else
#define ZIGGURAT_GPT_VOCABULARY_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace ziggurat::gpt::kernels::HWY_NAMESPACE::typed_kernels {

template <class E>
void embed(const std::uint8_t* tokens, std::int64_t rows, std::int64_t width, std::int64_t context,
           std::int64_t first, ConstArray wte, ConstArray wpe, Array out) {
  auto* x = typed<E>(out);
  for (std::int64_t row = 0; row < rows; ++row, x += width) {
    const auto* token = typed<E>(wte) + tokens[row] * width;
    const auto* position = typed<E>(wpe) + (first + row) % context * width;
    for (std::int64_t c = 0; c < width; c += kLanes)
      E::store(hn::Add(E::load(token + c), E::load(position + c)), x + c);
  }
}

template <class E>
void embed_backward_columns(const std::uint8_t* tokens, std::int64_t rows, std::int64_t width,
                            std::int64_t context, ConstArray d_out, std::int64_t columns,
                            float* d_wte, float* d_wpe) {
  const F32 d;
  const auto* dx = typed<E>(d_out);
  for (std::int64_t row = 0; row < rows; ++row, dx += width) {
    float* token = d_wte + tokens[row] * width;
    float* position = d_wpe + row % context * width;
    for (std::int64_t c = 0; c < columns; c += kLanes) {
      const Vec g = E::load(dx + c);
      hn::StoreU(hn::Add(hn::LoadU(d, token + c), g), d, token + c);
      hn::StoreU(hn::Add(hn::LoadU(d, position + c), g), d, position + c);
    }
  }
}

template <class E>
void embed_tokens(const std::uint8_t* tokens, std::int64_t rows, std::int64_t width,
                  TokenRange range, ConstArray wte, Array out) {
  auto* x = typed<E>(out);
  for (std::int64_t row = 0; row < rows; ++row, x += width) {
    const std::int64_t token = tokens[row] - range.first;
    const bool here = token >= 0 && token < range.count;
    const auto* from = typed<E>(wte) + (here ? token : 0) * width;
    for (std::int64_t c = 0; c < width; c += kLanes)
      E::store(here ? E::load(from + c) : hn::Zero(F32()), x + c);
  }
}

template <class E>
void add_positions(std::int64_t rows, std::int64_t width, std::int64_t context, std::int64_t first,
                   ConstArray wpe, ConstArray sums, Array out) {
  const auto* sum = typed<E>(sums);
  auto* x = typed<E>(out);
  for (std::int64_t row = 0; row < rows; ++row, sum += width, x += width) {
    const auto* position = typed<E>(wpe) + (first + row) % context * width;
    for (std::int64_t c = 0; c < width; c += kLanes)
      E::store(hn::Add(E::load(sum + c), E::load(position + c)), x + c);
  }
}

template <class E>
void embed_tokens_backward_columns(const std::uint8_t* tokens, std::int64_t rows,
                                   std::int64_t width, TokenRange range, ConstArray d_out,
                                   std::int64_t columns, float* d_wte) {
  const F32 d;
  const auto* dx = typed<E>(d_out);
  for (std::int64_t row = 0; row < rows; ++row, dx += width) {
    const std::int64_t token = tokens[row] - range.first;
    if (token < 0 || token >= range.count) continue;
    float* to = d_wte + token * width;
    for (std::int64_t c = 0; c < columns; c += kLanes)
      hn::StoreU(hn::Add(hn::LoadU(d, to + c), E::load(dx + c)), d, to + c);
  }
}

template <class E>
void add_positions_backward_columns(std::int64_t rows, std::int64_t width, std::int64_t context,
                                    std::int64_t first, ConstArray d_out, std::int64_t columns,
                                    float* d_wpe) {
  const F32 d;
  const auto* dx = typed<E>(d_out);
  for (std::int64_t row = 0; row < rows; ++row, dx += width) {
    float* to = d_wpe + (first + row) % context * width;
    for (std::int64_t c = 0; c < columns; c += kLanes)
      hn::StoreU(hn::Add(hn::LoadU(d, to + c), E::load(dx + c)), d, to + c);
  }
}

HWY_INLINE float row_maximum(const float* logits, std::int64_t columns) {
  const F32 d;
  Lanes16 best;
  best.fill(-3.0e38F);
  for (std::int64_t c = 0; c < columns; c += kBlock) {
    for (std::size_t i = 0; i < kVectors; ++i)
      best.v[i] = hn::Max(best.v[i], hn::LoadU(d, logits + c + i * kLanes));
  }
  return best.max();
}

// Returns the sum of exp(logit - maximum).
HWY_INLINE float row_exp_sum(const float* logits, std::int64_t columns, Vec maximum) {
  const F32 d;
  Lanes16 sum;
  sum.fill(0.0F);
  for (std::int64_t c = 0; c < columns; c += kBlock) {
    for (std::size_t i = 0; i < kVectors; ++i) {
      sum.v[i] =
          hn::Add(sum.v[i], exp_clamped(hn::Sub(hn::LoadU(d, logits + c + i * kLanes), maximum)));
    }
  }
  return sum.sum();
}

template <class E>
void softmax_part(const float* logits, const std::uint8_t* targets, std::int64_t rows,
                  TokenRange range, LogitsPart* parts) {
  for (std::int64_t row = 0; row < rows; ++row, logits += range.count) {
    const float maximum = row_maximum(logits, range.count);
    const std::int64_t target = targets[row] - range.first;
    const bool here = target >= 0 && target < range.count;
    parts[row] = {maximum, row_exp_sum(logits, range.count, hn::Set(F32(), maximum)),
                  here ? logits[target] : 0.0F};
  }
}

template <class E>
void cross_entropy_of_parts(const float* logits, const LogitsParts& all,
                            const std::uint8_t* targets, std::int64_t rows, TokenRange range,
                            float scale, float* losses, Array d_out) {
  const F32 d;
  auto* d_logits = typed<E>(d_out);
  for (std::int64_t row = 0; row < rows; ++row, logits += range.count) {
    const auto part = [&](std::int64_t rank) { return all.parts[rank * all.stride + row]; };
    float largest = part(0).maximum;
    for (std::int64_t rank = 1; rank < all.ranks; ++rank)
      largest = part(rank).maximum > largest ? part(rank).maximum : largest;
    const Vec maximum = hn::Set(d, largest);
    float total = 0.0F;
    float of_target = 0.0F;
    for (std::int64_t rank = 0; rank < all.ranks; ++rank) {
      const Vec own = exp_clamped(hn::Sub(hn::Set(d, part(rank).maximum), maximum));
      total = total + part(rank).sum * hn::GetLane(own);
      of_target = of_target + part(rank).target;
    }
    losses[row] =
        static_cast<float>(portable_log(static_cast<double>(total))) + (largest - of_target);
    if (d_logits == nullptr) continue;
    const Vec factor = hn::Set(d, scale / total);
    for (std::int64_t c = 0; c < range.count; c += kLanes) {
      E::store(hn::Mul(exp_clamped(hn::Sub(hn::LoadU(d, logits + c), maximum)), factor),
               d_logits + c);
    }
    const std::int64_t target = targets[row] - range.first;
    if (target >= 0 && target < range.count) {
      const Vec e = exp_clamped(hn::Sub(hn::Set(d, logits[target]), maximum));
      d_logits[target] = E::narrow(hn::GetLane(e) * (scale / total) - scale);
    }
    d_logits += range.count;
  }
}

template <class E>
void cross_entropy(const float* logits, const std::uint8_t* targets, std::int64_t rows,
                   std::int64_t vocabulary, float scale, float* losses, Array d_out) {
  const F32 d;
  auto* d_logits = typed<E>(d_out);
  for (std::int64_t row = 0; row < rows; ++row, logits += vocabulary) {
    const Vec maximum = hn::Set(d, row_maximum(logits, vocabulary));
    const float total = row_exp_sum(logits, vocabulary, maximum);
    const std::int64_t target = targets[row];
    losses[row] = static_cast<float>(portable_log(static_cast<double>(total))) +
                  (hn::GetLane(maximum) - logits[target]);
    if (d_logits == nullptr) continue;
    const Vec factor = hn::Set(d, scale / total);
    for (std::int64_t c = 0; c < vocabulary; c += kLanes) {
      E::store(hn::Mul(exp_clamped(hn::Sub(hn::LoadU(d, logits + c), maximum)), factor),
               d_logits + c);
    }
    // Computes exp_clamped of the target again, in the vector arithmetic used above, and subtracts
    // the one.
    const Vec e = exp_clamped(hn::Sub(hn::Set(d, logits[target]), maximum));
    d_logits[target] = E::narrow(hn::GetLane(e) * (scale / total) - scale);
    d_logits += vocabulary;
  }
}

}  // namespace ziggurat::gpt::kernels::HWY_NAMESPACE::typed_kernels
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard
