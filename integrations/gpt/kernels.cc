// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/kernels.cc: the kernels, compiled for every SIMD target and chosen at run time.
#include "integrations/gpt/kernels.h"

#include <cmath>
#include <string>

#include "base/error.h"
#include "integrations/gpt/random.h"

// Scalable vectors have no arrays; their machines run the 128-bit kernels, with the same bits.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "integrations/gpt/kernels.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "integrations/gpt/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ziggurat::gpt::kernels::HWY_NAMESPACE {

void widen(const bf16* from, std::int64_t count, float* to) {
  std::int64_t i = 0;
  for (; i + static_cast<std::int64_t>(kLanes) <= count; i += kLanes)
    hn::StoreU(load_bf16(from + i), F32(), to + i);
  for (; i < count; ++i) to[i] = bf16_to_float(from[i]);
}

void store(const Tile& tile, Rows out) {
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    const float* from = tile.data + row * tile.leading;
    bf16* to = out.data + row * out.leading;
    std::int64_t c = 0;
    for (; c + static_cast<std::int64_t>(kLanes) <= tile.columns; c += kLanes)
      store_bf16(hn::LoadU(F32(), from + c), to + c);
    for (; c < tile.columns; ++c) to[c] = float_to_bf16(from[c]);
  }
}

void store_bias(const Tile& tile, const bf16* bias, Rows out) {
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    const float* from = tile.data + row * tile.leading;
    bf16* to = out.data + row * out.leading;
    for (std::int64_t c = 0; c < tile.columns; c += kLanes) {
      store_bf16(hn::Add(hn::LoadU(F32(), from + c), load_bf16(bias + c)), to + c);
    }
  }
}

void store_bias_residual(const Tile& tile, const bf16* bias, ConstRows residual, Rows out) {
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    const float* from = tile.data + row * tile.leading;
    const bf16* base = residual.data + row * residual.leading;
    bf16* to = out.data + row * out.leading;
    for (std::int64_t c = 0; c < tile.columns; c += kLanes) {
      const Vec product = hn::Add(hn::LoadU(F32(), from + c), load_bf16(bias + c));
      store_bf16(hn::Add(load_bf16(base + c), product), to + c);
    }
  }
}

void store_bias_gelu(const Tile& tile, const bf16* bias, Rows before, Rows out) {
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    const float* from = tile.data + row * tile.leading;
    bf16* to = out.data + row * out.leading;
    bf16* keep = before.data == nullptr ? nullptr : before.data + row * before.leading;
    for (std::int64_t c = 0; c < tile.columns; c += kLanes) {
      const Vec x = round_to_bf16(hn::Add(hn::LoadU(F32(), from + c), load_bf16(bias + c)));
      if (keep != nullptr) store_bf16(x, keep + c);
      store_bf16(gelu(x), to + c);
    }
  }
}

void store_gelu_backward(const Tile& tile, Rows before) {
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    const float* from = tile.data + row * tile.leading;
    bf16* x = before.data + row * before.leading;
    for (std::int64_t c = 0; c < tile.columns; c += kLanes) {
      store_bf16(hn::Mul(hn::LoadU(F32(), from + c), gelu_derivative(load_bf16(x + c))), x + c);
    }
  }
}

void layernorm(const bf16* x, std::int64_t rows, std::int64_t width, const Affine& affine, bf16* y,
               RowStats* stats) {
  const F32 d;
  const auto divisor = static_cast<float>(width);
  for (std::int64_t row = 0; row < rows; ++row, x += width, y += width) {
    Lanes16 sum;
    sum.fill(0.0F);
    for (std::int64_t c = 0; c < width; c += kBlock) {
      for (std::size_t i = 0; i < kVectors; ++i)
        sum.v[i] = hn::Add(sum.v[i], load_bf16(x + c + i * kLanes));
    }
    const float mean = sum.sum() / divisor;
    sum.fill(0.0F);
    for (std::int64_t c = 0; c < width; c += kBlock) {
      for (std::size_t i = 0; i < kVectors; ++i) {
        const Vec centred = hn::Sub(load_bf16(x + c + i * kLanes), hn::Set(d, mean));
        sum.v[i] = hn::Add(sum.v[i], hn::Mul(centred, centred));
      }
    }
    const float inverse = 1.0F / std::sqrt(sum.sum() / divisor + 1e-5F);
    stats[row] = {mean, inverse};
    for (std::int64_t c = 0; c < width; c += kLanes) {
      const Vec normal = hn::Mul(hn::Sub(load_bf16(x + c), hn::Set(d, mean)), hn::Set(d, inverse));
      store_bf16(hn::Add(hn::Mul(normal, load_bf16(affine.weight + c)), load_bf16(affine.bias + c)),
                 y + c);
    }
  }
}

// With n = normalised x and g = dy * weight: dx = inverse * (g - mean(g) - n * mean(g n)).
void layernorm_backward(const bf16* dy, const bf16* x, const RowStats* stats, const bf16* weight,
                        std::int64_t rows, std::int64_t width, const bf16* residual, bf16* out) {
  const F32 d;
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
        const Vec g = hn::Mul(load_bf16(dy + at), load_bf16(weight + at));
        const Vec n = hn::Mul(hn::Sub(load_bf16(x + at), mean), inverse);
        sum_g.v[i] = hn::Add(sum_g.v[i], g);
        sum_gn.v[i] = hn::Add(sum_gn.v[i], hn::Mul(g, n));
      }
    }
    const Vec mean_g = hn::Set(d, sum_g.sum() / divisor);
    const Vec mean_gn = hn::Set(d, sum_gn.sum() / divisor);
    for (std::int64_t c = 0; c < width; c += kLanes) {
      const Vec g = hn::Mul(load_bf16(dy + c), load_bf16(weight + c));
      const Vec n = hn::Mul(hn::Sub(load_bf16(x + c), mean), inverse);
      const Vec dx = hn::Mul(inverse, hn::Sub(hn::Sub(g, mean_g), hn::Mul(n, mean_gn)));
      store_bf16(residual == nullptr ? dx : hn::Add(load_bf16(residual + c), dx), out + c);
    }
    if (residual != nullptr) residual += width;
  }
}

// Strips of four vectors: whole cache lines of every row, and the sums stay in registers.
constexpr std::int64_t kStrip = 4;

template <std::int64_t kVectorsOfStrip>
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
      const Vec g = load_bf16(dy.data + row * dy.leading + at);
      const Vec n = hn::Mul(hn::Sub(load_bf16(x.data + row * x.leading + at), mean), inverse);
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

void layernorm_backward_columns(ConstRows dy, ConstRows x, const RowStats* stats, std::int64_t rows,
                                std::int64_t columns, float* d_weight, float* d_bias) {
  constexpr auto kLane = static_cast<std::int64_t>(kLanes);
  std::int64_t c = 0;
  for (; c + kStrip * kLane <= columns; c += kStrip * kLane) {
    layernorm_columns_strip<kStrip>({dy.data + c, dy.leading}, {x.data + c, x.leading}, stats, rows,
                                    d_weight + c, d_bias + c);
  }
  for (; c < columns; c += kLane) {
    layernorm_columns_strip<1>({dy.data + c, dy.leading}, {x.data + c, x.leading}, stats, rows,
                               d_weight + c, d_bias + c);
  }
}

template <std::int64_t kVectorsOfStrip>
HWY_INLINE void column_sums_strip(const ConstRows& x, std::int64_t rows, float* sums) {
  const F32 d;
  Vec sum[kVectorsOfStrip];
  for (std::int64_t i = 0; i < kVectorsOfStrip; ++i) sum[i] = hn::Zero(d);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t i = 0; i < kVectorsOfStrip; ++i) {
      sum[i] = hn::Add(sum[i],
                       load_bf16(x.data + row * x.leading + i * static_cast<std::int64_t>(kLanes)));
    }
  }
  for (std::int64_t i = 0; i < kVectorsOfStrip; ++i) {
    const std::int64_t at = i * static_cast<std::int64_t>(kLanes);
    hn::StoreU(hn::Add(hn::LoadU(d, sums + at), sum[i]), d, sums + at);
  }
}

void add_column_sums(ConstRows x, std::int64_t rows, std::int64_t columns, float* sums) {
  constexpr auto kLane = static_cast<std::int64_t>(kLanes);
  std::int64_t c = 0;
  for (; c + kStrip * kLane <= columns; c += kStrip * kLane)
    column_sums_strip<kStrip>({x.data + c, x.leading}, rows, sums + c);
  for (; c < columns; c += kLane) column_sums_strip<1>({x.data + c, x.leading}, rows, sums + c);
}

HWY_INLINE void zero_bf16(bf16* to, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) to[i] = 0;
}

// Lanes of a vector that starts at key `begin` and lie below `end`.
HWY_INLINE hn::Mask<F32> keys_below(std::int64_t begin, std::int64_t end) {
  const I32 i32;
  const auto key = hn::Iota(i32, static_cast<std::int32_t>(begin));
  return hn::RebindMask(F32(), hn::Lt(key, hn::Set(i32, static_cast<std::int32_t>(end))));
}

void causal_softmax(const CausalRows& shape, float* scores, bf16* probabilities, RowStats* stats) {
  const F32 d;
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
      store_bf16(hn::Mul(hn::LoadU(d, scores + c), hn::Set(d, inverse)), probabilities + c);
    zero_bf16(probabilities, c, shape.leading);
  }
}

void causal_softmax_backward(const CausalRows& shape, const float* scores, const RowStats* stats,
                             const float* d_probabilities, const float* dots, bf16* probabilities,
                             bf16* d_scores) {
  const F32 d;
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
      store_bf16(hn::IfThenElseZero(sees, p), probabilities + start + c);
      store_bf16(hn::IfThenElseZero(sees, ds), d_scores + start + c);
    }
    zero_bf16(probabilities + start, c, shape.leading);
    zero_bf16(d_scores + start, c, shape.leading);
  }
}

void row_dots(ConstRows a, ConstRows b, std::int64_t rows, std::int64_t columns, float* dots) {
  for (std::int64_t row = 0; row < rows; ++row) {
    const bf16* x = a.data + row * a.leading;
    const bf16* y = b.data + row * b.leading;
    Lanes16 sum;
    sum.fill(0.0F);
    std::int64_t c = 0;
    for (; c + static_cast<std::int64_t>(kBlock) <= columns; c += kBlock) {
      for (std::size_t i = 0; i < kVectors; ++i) {
        sum.v[i] = hn::Add(sum.v[i],
                           hn::Mul(load_bf16(x + c + i * kLanes), load_bf16(y + c + i * kLanes)));
      }
    }
    float lanes[kBlock];
    sum.to_array(lanes);
    for (; c < columns; ++c) lanes[c % kBlock] += bf16_to_float(x[c]) * bf16_to_float(y[c]);
    dots[row] = Lanes16::tree_sum(lanes);
  }
}

void embed(const std::uint8_t* tokens, std::int64_t rows, std::int64_t width, std::int64_t context,
           std::int64_t first, const bf16* wte, const bf16* wpe, bf16* x) {
  for (std::int64_t row = 0; row < rows; ++row, x += width) {
    const bf16* token = wte + tokens[row] * width;
    const bf16* position = wpe + (first + row) % context * width;
    for (std::int64_t c = 0; c < width; c += kLanes)
      store_bf16(hn::Add(load_bf16(token + c), load_bf16(position + c)), x + c);
  }
}

void embed_backward_columns(const std::uint8_t* tokens, std::int64_t rows, std::int64_t width,
                            std::int64_t context, const bf16* dx, std::int64_t columns,
                            float* d_wte, float* d_wpe) {
  const F32 d;
  for (std::int64_t row = 0; row < rows; ++row, dx += width) {
    float* token = d_wte + tokens[row] * width;
    float* position = d_wpe + row % context * width;
    for (std::int64_t c = 0; c < columns; c += kLanes) {
      const Vec g = load_bf16(dx + c);
      hn::StoreU(hn::Add(hn::LoadU(d, token + c), g), d, token + c);
      hn::StoreU(hn::Add(hn::LoadU(d, position + c), g), d, position + c);
    }
  }
}

void cross_entropy(const float* logits, const std::uint8_t* targets, std::int64_t rows,
                   std::int64_t vocabulary, float scale, float* losses, bf16* d_logits) {
  const F32 d;
  for (std::int64_t row = 0; row < rows; ++row, logits += vocabulary) {
    Lanes16 best;
    best.fill(-3.0e38F);
    for (std::int64_t c = 0; c < vocabulary; c += kBlock) {
      for (std::size_t i = 0; i < kVectors; ++i)
        best.v[i] = hn::Max(best.v[i], hn::LoadU(d, logits + c + i * kLanes));
    }
    const Vec maximum = hn::Set(d, best.max());
    Lanes16 sum;
    sum.fill(0.0F);
    for (std::int64_t c = 0; c < vocabulary; c += kBlock) {
      for (std::size_t i = 0; i < kVectors; ++i) {
        sum.v[i] =
            hn::Add(sum.v[i], exp_clamped(hn::Sub(hn::LoadU(d, logits + c + i * kLanes), maximum)));
      }
    }
    const float total = sum.sum();
    const std::int64_t target = targets[row];
    losses[row] = static_cast<float>(portable_log(static_cast<double>(total))) +
                  (hn::GetLane(maximum) - logits[target]);
    if (d_logits == nullptr) continue;
    const Vec factor = hn::Set(d, scale / total);
    for (std::int64_t c = 0; c < vocabulary; c += kLanes) {
      store_bf16(hn::Mul(exp_clamped(hn::Sub(hn::LoadU(d, logits + c), maximum)), factor),
                 d_logits + c);
    }
    // exp_clamped of the target once more, in the lane arithmetic above, less the one.
    const Vec e = exp_clamped(hn::Sub(hn::Set(d, logits[target]), maximum));
    d_logits[target] = float_to_bf16(hn::GetLane(e) * (scale / total) - scale);
    d_logits += vocabulary;
  }
}

}  // namespace ziggurat::gpt::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ziggurat::gpt::kernels {

#define ZIGGURAT_GPT_KERNEL(name, parameters, arguments) \
  HWY_EXPORT(name);                                      \
  void name parameters { HWY_DYNAMIC_DISPATCH(name) arguments; }

ZIGGURAT_GPT_KERNEL(widen, (const bf16* from, std::int64_t count, float* to), (from, count, to))
ZIGGURAT_GPT_KERNEL(store, (const Tile& tile, Rows out), (tile, out))
ZIGGURAT_GPT_KERNEL(store_bias, (const Tile& tile, const bf16* bias, Rows out), (tile, bias, out))
ZIGGURAT_GPT_KERNEL(store_bias_residual,
                    (const Tile& tile, const bf16* bias, ConstRows residual, Rows out),
                    (tile, bias, residual, out))
ZIGGURAT_GPT_KERNEL(store_bias_gelu, (const Tile& tile, const bf16* bias, Rows before, Rows out),
                    (tile, bias, before, out))
ZIGGURAT_GPT_KERNEL(store_gelu_backward, (const Tile& tile, Rows before), (tile, before))
ZIGGURAT_GPT_KERNEL(layernorm,
                    (const bf16* x, std::int64_t rows, std::int64_t width, const Affine& affine,
                     bf16* y, RowStats* stats),
                    (x, rows, width, affine, y, stats))
ZIGGURAT_GPT_KERNEL(layernorm_backward,
                    (const bf16* dy, const bf16* x, const RowStats* stats, const bf16* weight,
                     std::int64_t rows, std::int64_t width, const bf16* residual, bf16* out),
                    (dy, x, stats, weight, rows, width, residual, out))
ZIGGURAT_GPT_KERNEL(layernorm_backward_columns,
                    (ConstRows dy, ConstRows x, const RowStats* stats, std::int64_t rows,
                     std::int64_t columns, float* d_weight, float* d_bias),
                    (dy, x, stats, rows, columns, d_weight, d_bias))
ZIGGURAT_GPT_KERNEL(add_column_sums,
                    (ConstRows x, std::int64_t rows, std::int64_t columns, float* sums),
                    (x, rows, columns, sums))
ZIGGURAT_GPT_KERNEL(causal_softmax,
                    (const CausalRows& shape, float* scores, bf16* probabilities, RowStats* stats),
                    (shape, scores, probabilities, stats))
ZIGGURAT_GPT_KERNEL(causal_softmax_backward,
                    (const CausalRows& shape, const float* scores, const RowStats* stats,
                     const float* d_probabilities, const float* dots, bf16* probabilities,
                     bf16* d_scores),
                    (shape, scores, stats, d_probabilities, dots, probabilities, d_scores))
ZIGGURAT_GPT_KERNEL(row_dots,
                    (ConstRows a, ConstRows b, std::int64_t rows, std::int64_t columns,
                     float* dots),
                    (a, b, rows, columns, dots))
ZIGGURAT_GPT_KERNEL(embed,
                    (const std::uint8_t* tokens, std::int64_t rows, std::int64_t width,
                     std::int64_t context, std::int64_t first, const bf16* wte, const bf16* wpe,
                     bf16* x),
                    (tokens, rows, width, context, first, wte, wpe, x))
ZIGGURAT_GPT_KERNEL(embed_backward_columns,
                    (const std::uint8_t* tokens, std::int64_t rows, std::int64_t width,
                     std::int64_t context, const bf16* dx, std::int64_t columns, float* d_wte,
                     float* d_wpe),
                    (tokens, rows, width, context, dx, columns, d_wte, d_wpe))
ZIGGURAT_GPT_KERNEL(cross_entropy,
                    (const float* logits, const std::uint8_t* targets, std::int64_t rows,
                     std::int64_t vocabulary, float scale, float* losses, bf16* d_logits),
                    (logits, targets, rows, vocabulary, scale, losses, d_logits))
#undef ZIGGURAT_GPT_KERNEL

std::vector<std::string_view> simd_targets() {
  std::vector<std::string_view> names;
  for (std::int64_t rest = hwy::SupportedTargets() & HWY_TARGETS; rest != 0; rest &= rest - 1) {
    names.push_back(hwy::TargetName(rest & -rest));
  }
  return names;
}

void force_simd_target(std::string_view name) {
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  if (name.empty()) return;
  for (std::int64_t rest = hwy::SupportedTargets() & HWY_TARGETS; rest != 0; rest &= rest - 1) {
    const std::int64_t target = rest & -rest;
    if (hwy::TargetName(target) == name) {
      hwy::SetSupportedTargetsForTest(target);
      hwy::GetChosenTarget().Update(target);
      return;
    }
  }
  throw Error(ErrorCode::kInvalidArgument, "no SIMD target \"" + std::string(name) + "\" here");
}

}  // namespace ziggurat::gpt::kernels
#endif  // HWY_ONCE
