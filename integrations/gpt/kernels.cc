// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/kernels.cc: the kernels, compiled for every element type and SIMD target and
// chosen at run time.
#include "integrations/gpt/kernels.h"

#include <string>

#include "base/error.h"

// Arrays of scalable vectors do not exist, so machines with scalable vectors run the 128-bit
// kernels, which give the same bits.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "integrations/gpt/kernels.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "integrations/gpt/kernels_inl.h"
#include "integrations/gpt/vocabulary_inl.h"

// Lists each kernel as (name, element type, parameters, arguments).
#define ZIGGURAT_GPT_KERNELS(KERNEL)                                                               \
  KERNEL(widen, from.dtype, (ConstArray from, std::int64_t count, float* to), (from, count, to))   \
  KERNEL(store, out.data.dtype, (const Tile& tile, Rows out), (tile, out))                         \
  KERNEL(store_bias, bias.dtype, (const Tile& tile, ConstArray bias, Rows out), (tile, bias, out)) \
  KERNEL(store_bias_residual, bias.dtype,                                                          \
         (const Tile& tile, ConstArray bias, ConstRows residual, Rows out),                        \
         (tile, bias, residual, out))                                                              \
  KERNEL(add_bias_residual, bias.dtype,                                                            \
         (ConstArray sum, ConstArray bias, ConstArray residual, std::int64_t rows,                 \
          std::int64_t width, Array out),                                                          \
         (sum, bias, residual, rows, width, out))                                                  \
  KERNEL(store_bias_gelu, bias.dtype, (const Tile& tile, ConstArray bias, Rows before, Rows out),  \
         (tile, bias, before, out))                                                                \
  KERNEL(store_gelu_backward, before.data.dtype, (const Tile& tile, Rows before), (tile, before))  \
  KERNEL(layernorm, x.dtype,                                                                       \
         (ConstArray x, std::int64_t rows, std::int64_t width, const Affine& affine, Array y,      \
          RowStats* stats),                                                                        \
         (x, rows, width, affine, y, stats))                                                       \
  KERNEL(layernorm_backward, dy.dtype,                                                             \
         (ConstArray dy, ConstArray x, const RowStats* stats, ConstArray weight,                   \
          std::int64_t rows, std::int64_t width, ConstArray residual, Array out),                  \
         (dy, x, stats, weight, rows, width, residual, out))                                       \
  KERNEL(layernorm_backward_columns, dy.data.dtype,                                                \
         (ConstRows dy, ConstRows x, const RowStats* stats, std::int64_t rows,                     \
          std::int64_t columns, float* d_weight, float* d_bias),                                   \
         (dy, x, stats, rows, columns, d_weight, d_bias))                                          \
  KERNEL(add_column_sums, x.data.dtype,                                                            \
         (ConstRows x, std::int64_t rows, std::int64_t columns, float* sums),                      \
         (x, rows, columns, sums))                                                                 \
  KERNEL(causal_softmax, probabilities.dtype,                                                      \
         (const CausalRows& shape, float* scores, Array probabilities, RowStats* stats),           \
         (shape, scores, probabilities, stats))                                                    \
  KERNEL(causal_softmax_backward, probabilities.dtype,                                             \
         (const CausalRows& shape, const float* scores, const RowStats* stats,                     \
          const float* d_probabilities, const float* dots, Array probabilities, Array d_scores),   \
         (shape, scores, stats, d_probabilities, dots, probabilities, d_scores))                   \
  KERNEL(row_dots, a.data.dtype,                                                                   \
         (ConstRows a, ConstRows b, std::int64_t rows, std::int64_t columns, float* dots),         \
         (a, b, rows, columns, dots))                                                              \
  KERNEL(embed, x.dtype,                                                                           \
         (const std::uint8_t* tokens, std::int64_t rows, std::int64_t width, std::int64_t context, \
          std::int64_t first, ConstArray wte, ConstArray wpe, Array x),                            \
         (tokens, rows, width, context, first, wte, wpe, x))                                       \
  KERNEL(embed_backward_columns, dx.dtype,                                                         \
         (const std::uint8_t* tokens, std::int64_t rows, std::int64_t width, std::int64_t context, \
          ConstArray dx, std::int64_t columns, float* d_wte, float* d_wpe),                        \
         (tokens, rows, width, context, dx, columns, d_wte, d_wpe))                                \
  KERNEL(embed_tokens, x.dtype,                                                                    \
         (const std::uint8_t* tokens, std::int64_t rows, std::int64_t width, TokenRange range,     \
          ConstArray wte, Array x),                                                                \
         (tokens, rows, width, range, wte, x))                                                     \
  KERNEL(add_positions, x.dtype,                                                                   \
         (std::int64_t rows, std::int64_t width, std::int64_t context, std::int64_t first,         \
          ConstArray wpe, ConstArray sum, Array x),                                                \
         (rows, width, context, first, wpe, sum, x))                                               \
  KERNEL(embed_tokens_backward_columns, dx.dtype,                                                  \
         (const std::uint8_t* tokens, std::int64_t rows, std::int64_t width, TokenRange range,     \
          ConstArray dx, std::int64_t columns, float* d_wte),                                      \
         (tokens, rows, width, range, dx, columns, d_wte))                                         \
  KERNEL(add_positions_backward_columns, dx.dtype,                                                 \
         (std::int64_t rows, std::int64_t width, std::int64_t context, std::int64_t first,         \
          ConstArray dx, std::int64_t columns, float* d_wpe),                                      \
         (rows, width, context, first, dx, columns, d_wpe))                                        \
  KERNEL(softmax_part, DType::kFloat32,                                                            \
         (const float* logits, const std::uint8_t* targets, std::int64_t rows, TokenRange range,   \
          LogitsPart* parts),                                                                      \
         (logits, targets, rows, range, parts))                                                    \
  KERNEL(cross_entropy_of_parts, d_logits.dtype,                                                   \
         (const float* logits, const LogitsParts& all, const std::uint8_t* targets,                \
          std::int64_t rows, TokenRange range, float scale, float* losses, Array d_logits),        \
         (logits, all, targets, rows, range, scale, losses, d_logits))                             \
  KERNEL(cross_entropy, d_logits.dtype,                                                            \
         (const float* logits, const std::uint8_t* targets, std::int64_t rows,                     \
          std::int64_t vocabulary, float scale, float* losses, Array d_logits),                    \
         (logits, targets, rows, vocabulary, scale, losses, d_logits))

HWY_BEFORE_NAMESPACE();
namespace ziggurat::gpt::kernels::HWY_NAMESPACE {

#define ZIGGURAT_GPT_BY_TYPE(name, type, parameters, arguments)          \
  void name parameters {                                                 \
    switch (type) {                                                      \
      case DType::kBFloat16: return typed_kernels::name<Bf16> arguments; \
      case DType::kFloat16: return typed_kernels::name<Fp16> arguments;  \
      case DType::kFloat32: return typed_kernels::name<Fp32> arguments;  \
    }                                                                    \
  }
ZIGGURAT_GPT_KERNELS(ZIGGURAT_GPT_BY_TYPE)
#undef ZIGGURAT_GPT_BY_TYPE

}  // namespace ziggurat::gpt::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ziggurat::gpt::kernels {

#define ZIGGURAT_GPT_BY_TARGET(name, type, parameters, arguments) \
  HWY_EXPORT(name);                                               \
  void name parameters { HWY_DYNAMIC_DISPATCH(name) arguments; }
ZIGGURAT_GPT_KERNELS(ZIGGURAT_GPT_BY_TARGET)
#undef ZIGGURAT_GPT_BY_TARGET

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
  throw Error(ErrorCode::kInvalidArgument,
              "this CPU or build has no SIMD target \"" + std::string(name) + "\"");
}

}  // namespace ziggurat::gpt::kernels
#endif  // HWY_ONCE
