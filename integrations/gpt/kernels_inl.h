// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/kernels_inl.h: the kernels of kernels.h for every element type: values are
// widened, computed in fp32 in the order written here, and rounded once. Included once per SIMD
// target.
#include <cmath>
#include <cstdint>

#include "hwy/highway.h"
#include "integrations/gpt/kernels.h"
#include "integrations/gpt/lanes_inl.h"

#if defined(ZIGGURAT_GPT_KERNELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZIGGURAT_GPT_KERNELS_INL_H_
#undef ZIGGURAT_GPT_KERNELS_INL_H_
#else
#define ZIGGURAT_GPT_KERNELS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace ziggurat::gpt::kernels::HWY_NAMESPACE::typed_kernels {

template <class E>
HWY_INLINE typename E::Type* typed(Array array) {
  return reinterpret_cast<typename E::Type*>(array.data);
}
template <class E>
HWY_INLINE const typename E::Type* typed(ConstArray array) {
  return reinterpret_cast<const typename E::Type*>(array.data);
}
template <class E>
HWY_INLINE typename E::Type* row_of(const Rows& rows, std::int64_t row) {
  return typed<E>(rows.data) + row * rows.leading;
}
template <class E>
HWY_INLINE const typename E::Type* row_of(const ConstRows& rows, std::int64_t row) {
  return typed<E>(rows.data) + row * rows.leading;
}

template <class E>
void widen(ConstArray values, std::int64_t count, float* to) {
  const auto* from = typed<E>(values);
  std::int64_t i = 0;
  for (; i + static_cast<std::int64_t>(kLanes) <= count; i += kLanes)
    hn::StoreU(E::load(from + i), F32(), to + i);
  for (; i < count; ++i) to[i] = E::widen(from[i]);
}

template <class E>
void store(const Tile& tile, Rows out) {
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    const float* from = tile.data + row * tile.leading;
    auto* to = row_of<E>(out, row);
    std::int64_t c = 0;
    for (; c + static_cast<std::int64_t>(kLanes) <= tile.columns; c += kLanes)
      E::store(hn::LoadU(F32(), from + c), to + c);
    for (; c < tile.columns; ++c) to[c] = E::narrow(from[c]);
  }
}

template <class E>
void store_bias(const Tile& tile, ConstArray biases, Rows out) {
  const auto* bias = typed<E>(biases);
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    const float* from = tile.data + row * tile.leading;
    auto* to = row_of<E>(out, row);
    for (std::int64_t c = 0; c < tile.columns; c += kLanes) {
      E::store(hn::Add(hn::LoadU(F32(), from + c), E::load(bias + c)), to + c);
    }
  }
}

template <class E>
void store_bias_residual(const Tile& tile, ConstArray biases, ConstRows residual, Rows out) {
  const auto* bias = typed<E>(biases);
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    const float* from = tile.data + row * tile.leading;
    const auto* base = row_of<E>(residual, row);
    auto* to = row_of<E>(out, row);
    for (std::int64_t c = 0; c < tile.columns; c += kLanes) {
      const Vec product = hn::Add(hn::LoadU(F32(), from + c), E::load(bias + c));
      E::store(hn::Add(E::load(base + c), product), to + c);
    }
  }
}

template <class E>
void add_bias_residual(ConstArray sums, ConstArray biases, ConstArray residuals, std::int64_t rows,
                       std::int64_t width, Array out) {
  const auto* sum = typed<E>(sums);
  const auto* bias = typed<E>(biases);
  const auto* base = typed<E>(residuals);
  auto* to = typed<E>(out);
  for (std::int64_t row = 0; row < rows; ++row, sum += width, base += width, to += width) {
    for (std::int64_t c = 0; c < width; c += kLanes) {
      const Vec product = hn::Add(E::load(sum + c), E::load(bias + c));
      E::store(hn::Add(E::load(base + c), product), to + c);
    }
  }
}

template <class E>
void store_bias_gelu(const Tile& tile, ConstArray biases, Rows before, Rows out) {
  const auto* bias = typed<E>(biases);
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    const float* from = tile.data + row * tile.leading;
    auto* to = row_of<E>(out, row);
    auto* keep = before.data ? row_of<E>(before, row) : nullptr;
    for (std::int64_t c = 0; c < tile.columns; c += kLanes) {
      const Vec x = E::round(hn::Add(hn::LoadU(F32(), from + c), E::load(bias + c)));
      if (keep != nullptr) E::store(x, keep + c);
      E::store(gelu(x), to + c);
    }
  }
}

template <class E>
void store_gelu_backward(const Tile& tile, Rows before) {
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    const float* from = tile.data + row * tile.leading;
    auto* x = row_of<E>(before, row);
    for (std::int64_t c = 0; c < tile.columns; c += kLanes) {
      E::store(hn::Mul(hn::LoadU(F32(), from + c), gelu_derivative(E::load(x + c))), x + c);
    }
  }
}

template <class E>
void layernorm(ConstArray in, std::int64_t rows, std::int64_t width, const Affine& affine,
               Array out, RowStats* stats) {
  const F32 d;
  const auto* x = typed<E>(in);
  const auto* weight = typed<E>(affine.weight);
  const auto* bias = typed<E>(affine.bias);
  auto* y = typed<E>(out);
  const auto divisor = static_cast<float>(width);
  for (std::int64_t row = 0; row < rows; ++row, x += width, y += width) {
    Lanes16 sum;
    sum.fill(0.0F);
    for (std::int64_t c = 0; c < width; c += kBlock) {
      for (std::size_t i = 0; i < kVectors; ++i)
        sum.v[i] = hn::Add(sum.v[i], E::load(x + c + i * kLanes));
    }
    const float mean = sum.sum() / divisor;
    sum.fill(0.0F);
    for (std::int64_t c = 0; c < width; c += kBlock) {
      for (std::size_t i = 0; i < kVectors; ++i) {
        const Vec centred = hn::Sub(E::load(x + c + i * kLanes), hn::Set(d, mean));
        sum.v[i] = hn::Add(sum.v[i], hn::Mul(centred, centred));
      }
    }
    const float inverse = 1.0F / std::sqrt(sum.sum() / divisor + 1e-5F);
    stats[row] = {mean, inverse};
    for (std::int64_t c = 0; c < width; c += kLanes) {
      const Vec normal = hn::Mul(hn::Sub(E::load(x + c), hn::Set(d, mean)), hn::Set(d, inverse));
      E::store(hn::Add(hn::Mul(normal, E::load(weight + c)), E::load(bias + c)), y + c);
    }
  }
}

// Computes dx = inverse * (g - mean(g) - n * mean(g n)), where n is the normalised x and g is dy *
// weight.
template <class E>
void layernorm_backward(ConstArray d_out, ConstArray in, const RowStats* stats, ConstArray weights,
                        std::int64_t rows, std::int64_t width, ConstArray residuals, Array d_in) {
  const F32 d;
  const auto* dy = typed<E>(d_out);
  const auto* x = typed<E>(in);
  const auto* weight = typed<E>(weights);
  const auto* residual = typed<E>(residuals);
  auto* out = typed<E>(d_in);
  const auto divisor = static_cast<float>(width);
  for (std::int64_t row = 0; row < rows; ++row, dy += width, x += width, out += width) {
    const Vec mean = hn::Set(d, stats[row].first);
    const Vec inverse = hn::Set(d, stats[row].second);
    Lanes16 sum_g;
    Lanes16 sum_gn;
    sum_g.fill(0.0F);
    sum_gn.fill(0.0F);
    for (std::int64_t c = 0; c < width; c += kBlock) {
      for (std::size_t i = 0; i < kVectors; ++i) {
        const std::int64_t at = c + static_cast<std::int64_t>(i * kLanes);
        const Vec g = hn::Mul(E::load(dy + at), E::load(weight + at));
        const Vec n = hn::Mul(hn::Sub(E::load(x + at), mean), inverse);
        sum_g.v[i] = hn::Add(sum_g.v[i], g);
        sum_gn.v[i] = hn::Add(sum_gn.v[i], hn::Mul(g, n));
      }
    }
    const Vec mean_g = hn::Set(d, sum_g.sum() / divisor);
    const Vec mean_gn = hn::Set(d, sum_gn.sum() / divisor);
    for (std::int64_t c = 0; c < width; c += kLanes) {
      const Vec g = hn::Mul(E::load(dy + c), E::load(weight + c));
      const Vec n = hn::Mul(hn::Sub(E::load(x + c), mean), inverse);
      const Vec dx = hn::Mul(inverse, hn::Sub(hn::Sub(g, mean_g), hn::Mul(n, mean_gn)));
      E::store(residual == nullptr ? dx : hn::Add(E::load(residual + c), dx), out + c);
    }
    if (residual != nullptr) residual += width;
  }
}

// A strip is four vectors wide: it covers whole cache lines of every row, and its sums stay in
// registers.
constexpr std::int64_t kStrip = 4;

template <class E, std::int64_t kVectorsOfStrip>
HWY_INLINE void layernorm_columns_strip(const ConstRows& dy, const ConstRows& x,
                                        const RowStats* stats, std::int64_t rows, float* d_weight,
                                        float* d_bias) {
  const F32 d;
  Vec weight_sum[kVectorsOfStrip];
  Vec bias_sum[kVectorsOfStrip];
  for (std::int64_t i = 0; i < kVectorsOfStrip; ++i) weight_sum[i] = bias_sum[i] = hn::Zero(d);
  for (std::int64_t row = 0; row < rows; ++row) {
    const Vec mean = hn::Set(d, stats[row].first);
    const Vec inverse = hn::Set(d, stats[row].second);
    for (std::int64_t i = 0; i < kVectorsOfStrip; ++i) {
      const std::int64_t at = i * static_cast<std::int64_t>(kLanes);
      const Vec g = E::load(row_of<E>(dy, row) + at);
      const Vec n = hn::Mul(hn::Sub(E::load(row_of<E>(x, row) + at), mean), inverse);
      weight_sum[i] = hn::Add(weight_sum[i], hn::Mul(g, n));
      bias_sum[i] = hn::Add(bias_sum[i], g);
    }
  }
  for (std::int64_t i = 0; i < kVectorsOfStrip; ++i) {
    const std::int64_t at = i * static_cast<std::int64_t>(kLanes);
    hn::StoreU(hn::Add(hn::LoadU(d, d_weight + at), weight_sum[i]), d, d_weight + at);
    hn::StoreU(hn::Add(hn::LoadU(d, d_bias + at), bias_sum[i]), d, d_bias + at);
  }
}

template <class E>
void layernorm_backward_columns(ConstRows dy, ConstRows x, const RowStats* stats, std::int64_t rows,
                                std::int64_t columns, float* d_weight, float* d_bias) {
  constexpr auto kLane = static_cast<std::int64_t>(kLanes);
  std::int64_t c = 0;
  for (; c + kStrip * kLane <= columns; c += kStrip * kLane) {
    layernorm_columns_strip<E, kStrip>({dy.data + c, dy.leading}, {x.data + c, x.leading}, stats,
                                       rows, d_weight + c, d_bias + c);
  }
  for (; c < columns; c += kLane) {
    layernorm_columns_strip<E, 1>({dy.data + c, dy.leading}, {x.data + c, x.leading}, stats, rows,
                                  d_weight + c, d_bias + c);
  }
}

template <class E, std::int64_t kVectorsOfStrip>
HWY_INLINE void column_sums_strip(const ConstRows& x, std::int64_t rows, float* sums) {
  const F32 d;
  Vec sum[kVectorsOfStrip];
  for (std::int64_t i = 0; i < kVectorsOfStrip; ++i) sum[i] = hn::Zero(d);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t i = 0; i < kVectorsOfStrip; ++i) {
      const std::int64_t at = i * static_cast<std::int64_t>(kLanes);
      sum[i] = hn::Add(sum[i], E::load(row_of<E>(x, row) + at));
    }
  }
  for (std::int64_t i = 0; i < kVectorsOfStrip; ++i) {
    const std::int64_t at = i * static_cast<std::int64_t>(kLanes);
    hn::StoreU(hn::Add(hn::LoadU(d, sums + at), sum[i]), d, sums + at);
  }
}

template <class E>
void add_column_sums(ConstRows x, std::int64_t rows, std::int64_t columns, float* sums) {
  constexpr auto kLane = static_cast<std::int64_t>(kLanes);
  std::int64_t c = 0;
  for (; c + kStrip * kLane <= columns; c += kStrip * kLane)
    column_sums_strip<E, kStrip>({x.data + c, x.leading}, rows, sums + c);
  for (; c < columns; c += kLane) column_sums_strip<E, 1>({x.data + c, x.leading}, rows, sums + c);
}

template <class Type>
HWY_INLINE void zero(Type* to, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) to[i] = 0;
}

// Returns the lanes whose keys lie below `end`, in a vector that starts at key `begin`.
HWY_INLINE hn::Mask<F32> keys_below(std::int64_t begin, std::int64_t end) {
  const I32 i32;
  const auto key = hn::Iota(i32, static_cast<std::int32_t>(begin));
  return hn::RebindMask(F32(), hn::Lt(key, hn::Set(i32, static_cast<std::int32_t>(end))));
}

template <class E>
void causal_softmax(const CausalRows& shape, float* scores, Array out, RowStats* stats) {
  const F32 d;
  auto* probabilities = typed<E>(out);
  const Vec scale = hn::Set(d, shape.scale);
  const Vec lowest = hn::Set(d, -3.0e38F);
  for (std::int64_t row = 0; row < shape.rows;
       ++row, scores += shape.leading, probabilities += shape.leading) {
    const std::int64_t seen = shape.first + row + 1;
    Lanes16 best;
    best.fill(-3.0e38F);
    for (std::int64_t c = 0; c < seen; c += kBlock) {
      for (std::size_t i = 0; i < kVectors; ++i) {
        const std::int64_t at = c + static_cast<std::int64_t>(i * kLanes);
        const Vec s = hn::Mul(hn::LoadU(d, scores + at), scale);
        best.v[i] = hn::Max(best.v[i], hn::IfThenElse(keys_below(at, seen), s, lowest));
      }
    }
    const Vec maximum = hn::Set(d, best.max());
    Lanes16 sum;
    sum.fill(0.0F);
    for (std::int64_t c = 0; c < seen; c += kBlock) {
      for (std::size_t i = 0; i < kVectors; ++i) {
        const std::int64_t at = c + static_cast<std::int64_t>(i * kLanes);
        const Vec s = hn::Mul(hn::LoadU(d, scores + at), scale);
        const Vec e = hn::IfThenElseZero(keys_below(at, seen), exp_clamped(hn::Sub(s, maximum)));
        hn::StoreU(e, d, scores + at);
        sum.v[i] = hn::Add(sum.v[i], e);
      }
    }
    const float inverse = 1.0F / sum.sum();
    stats[row] = {hn::GetLane(maximum), inverse};
    std::int64_t c = 0;
    for (; c < seen; c += kLanes)
      E::store(hn::Mul(hn::LoadU(d, scores + c), hn::Set(d, inverse)), probabilities + c);
    zero(probabilities, c, shape.leading);
  }
}

template <class E>
void causal_softmax_backward(const CausalRows& shape, const float* scores, const RowStats* stats,
                             const float* d_probabilities, const float* dots, Array p_out,
                             Array d_out) {
  const F32 d;
  auto* probabilities = typed<E>(p_out);
  auto* d_scores = typed<E>(d_out);
  const Vec scale = hn::Set(d, shape.scale);
  for (std::int64_t row = 0; row < shape.rows; ++row) {
    const std::int64_t start = row * shape.leading;
    const std::int64_t seen = shape.first + row + 1;
    const Vec maximum = hn::Set(d, stats[row].first);
    const Vec inverse = hn::Set(d, stats[row].second);
    const Vec dot = hn::Set(d, dots[row]);
    std::int64_t c = 0;
    for (; c < seen; c += kLanes) {
      const Vec s = hn::Mul(hn::LoadU(d, scores + start + c), scale);
      const auto sees = keys_below(c, seen);
      const Vec p = hn::Mul(exp_clamped(hn::Sub(s, maximum)), inverse);
      const Vec dp = hn::LoadU(d, d_probabilities + start + c);
      const Vec ds = hn::Mul(hn::Mul(p, hn::Sub(dp, dot)), scale);
      E::store(hn::IfThenElseZero(sees, p), probabilities + start + c);
      E::store(hn::IfThenElseZero(sees, ds), d_scores + start + c);
    }
    zero(probabilities + start, c, shape.leading);
    zero(d_scores + start, c, shape.leading);
  }
}

template <class E>
void row_dots(ConstRows a, ConstRows b, std::int64_t rows, std::int64_t columns, float* dots) {
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto* x = row_of<E>(a, row);
    const auto* y = row_of<E>(b, row);
    Lanes16 sum;
    sum.fill(0.0F);
    std::int64_t c = 0;
    for (; c + static_cast<std::int64_t>(kBlock) <= columns; c += kBlock) {
      for (std::size_t i = 0; i < kVectors; ++i) {
        sum.v[i] =
            hn::Add(sum.v[i], hn::Mul(E::load(x + c + i * kLanes), E::load(y + c + i * kLanes)));
      }
    }
    float lanes[kBlock];
    sum.to_array(lanes);
    for (; c < columns; ++c) lanes[c % kBlock] += E::widen(x[c]) * E::widen(y[c]);
    dots[row] = Lanes16::tree_sum(lanes);
  }
}

}  // namespace ziggurat::gpt::kernels::HWY_NAMESPACE::typed_kernels
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard
