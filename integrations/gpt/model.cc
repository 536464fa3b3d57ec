// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/model.cc: the parameters' names, shapes, offsets and initial values.
#include "integrations/gpt/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <memory>
#include <vector>

#include "base/error.h"
#include "integrations/gpt/random.h"

namespace ziggurat::gpt {
namespace {

[[noreturn]] void refuse(std::string_view text, const std::string& why) {
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format(
          "model \"{}\": {} (gpt2-small, gpt2-medium, or LAYERSxWIDTHxHEADS such as 12x768x12)",
          text, why));
}

enum class Init : std::uint8_t { kNormal, kResidualNormal, kZero, kOne };

struct NamedParam {
  ParamSpec spec;
  Init init;
};

/// How tensor parallelism divides a parameter. Matrices are [in, out]. A column-parallel layer
/// divides `out` and its bias, and a row-parallel layer divides `in` (Shoeybi et al. 2019,
/// "Megatron-LM", section 3).
constexpr int kColumns = 1;
constexpr int kRows = 0;
constexpr int kBias = 0;

/// The sections of c_attn, because each rank has the queries, keys and values of its heads.
constexpr int kQkv = 3;

ParamSpec matrix(std::string name, std::int64_t rows, std::int64_t columns, int tp_dim = -1,
                 int tp_sections = 1) {
  return {.name = std::move(name),
          .shape = {rows, columns},
          .tp_dim = tp_dim,
          .tp_sections = tp_sections};
}

ParamSpec vector(std::string name, std::int64_t count, int tp_dim = -1, int tp_sections = 1) {
  return {.name = std::move(name),
          .shape = {count},
          .decay = false,
          .tp_dim = tp_dim,
          .tp_sections = tp_sections};
}

// The one table from which spec, layout and initial values are read.
std::vector<NamedParam> embedding_params(const ModelConfig& c) {
  return {{matrix("wte.weight", c.vocabulary, c.width, kRows), Init::kNormal},
          {matrix("wpe.weight", c.context_max, c.width), Init::kNormal},
          {vector("ln_f.weight", c.width), Init::kOne},
          {vector("ln_f.bias", c.width), Init::kZero}};
}

std::vector<NamedParam> block_params(const ModelConfig& c, std::int64_t block) {
  const std::string h = fmt::format("h.{}.", block);
  return {{matrix(h + "attn.c_attn.weight", c.width, 3 * c.width, kColumns, kQkv), Init::kNormal},
          {matrix(h + "attn.c_proj.weight", c.width, c.width, kRows), Init::kResidualNormal},
          {matrix(h + "mlp.c_fc.weight", c.width, c.hidden(), kColumns), Init::kNormal},
          {matrix(h + "mlp.c_proj.weight", c.hidden(), c.width, kRows), Init::kResidualNormal},
          {vector(h + "ln_1.weight", c.width), Init::kOne},
          {vector(h + "ln_1.bias", c.width), Init::kZero},
          {vector(h + "attn.c_attn.bias", 3 * c.width, kBias, kQkv), Init::kZero},
          {vector(h + "attn.c_proj.bias", c.width), Init::kZero},
          {vector(h + "ln_2.weight", c.width), Init::kOne},
          {vector(h + "ln_2.bias", c.width), Init::kZero},
          {vector(h + "mlp.c_fc.bias", c.hidden(), kBias), Init::kZero},
          {vector(h + "mlp.c_proj.bias", c.width), Init::kZero}};
}

/// Returns a unit's parameters in the whole model.
std::vector<NamedParam> unit_params(const ModelConfig& c, UnitId unit) {
  return unit == kEmbeddingUnit ? embedding_params(c)
                                : block_params(c, static_cast<std::int64_t>(unit) - 1);
}

/// Returns the spec of a unit for config.part.
UnitSpec unit_spec(const ModelConfig& config, UnitId unit) {
  UnitSpec whole{
      .name = unit == kEmbeddingUnit ? std::string("embedding") : fmt::format("h.{}", unit - 1),
      .params = {}};
  for (NamedParam& param : unit_params(config, unit)) whole.params.push_back(std::move(param.spec));
  return part_of(whole, config.part.ranks);
}

std::vector<std::int64_t> offsets(const UnitSpec& unit) {
  std::vector<std::int64_t> result;
  std::int64_t next = 0;
  for (const ParamSpec& param : unit.params) {
    result.push_back(next);
    next += static_cast<std::int64_t>(param.count());
  }
  return result;
}

// A range of a unit's flat parameters that one rule initializes.
struct Segment {
  std::uint64_t end;
  Init init;
  float scale;
};

std::vector<Segment> segments(const ModelConfig& c, UnitId unit) {
  constexpr double kStddev = 0.02;
  const double residual = kStddev / std::sqrt(2.0 * static_cast<double>(c.layers));
  std::vector<Segment> result;
  std::uint64_t end = 0;
  for (const NamedParam& param : unit_params(c, unit)) {
    end += param.spec.count();
    result.push_back(
        {end, param.init,
         static_cast<float>(param.init == Init::kResidualNormal ? residual : kStddev)});
  }
  return result;
}

void fill(const Segment& segment, std::uint64_t key, std::uint64_t first, std::span<float> values) {
  switch (segment.init) {
    case Init::kNormal:
    case Init::kResidualNormal:
      fill_normal(key, first, values);
      for (float& value : values) value *= segment.scale;
      return;
    case Init::kZero: std::fill(values.begin(), values.end(), 0.0F); return;
    case Init::kOne: std::fill(values.begin(), values.end(), 1.0F); return;
  }
}

}  // namespace

ModelConfig parse_model(std::string_view text) {
  ModelConfig config;
  if (text == "gpt2-small") return config;
  if (text == "gpt2-medium") {
    config.layers = 24;
    config.width = 1024;
    config.heads = 16;
    return config;
  }
  const char* at = text.data();
  const char* const end = at + text.size();
  std::int64_t* const fields[] = {&config.layers, &config.width, &config.heads};
  for (std::int64_t* field : fields) {
    if (field != fields[0]) {
      if (at == end || *at != 'x')
        refuse(text, "the text is neither a known name nor three numbers with x between them");
      ++at;
    }
    const auto [next, error] = std::from_chars(at, end, *field);
    if (error != std::errc() || *field < 1)
      refuse(text,
             "the text is neither a known name nor three positive numbers with x between them");
    at = next;
  }
  if (at != end)
    refuse(text, fmt::format("\"{}\" follows the third number", std::string_view(at, end)));
  if (config.layers > 1000 || config.width > 65536)
    refuse(text, "a model may have at most 1000 layers, and a width of at most 65536");
  if (config.width % 16 != 0)
    refuse(text, fmt::format("width {} is not a multiple of 16", config.width));
  if (config.width % config.heads != 0) {
    refuse(text, fmt::format("width {} is not a multiple of {} heads", config.width, config.heads));
  }
  return config;
}

void require_divisible(const ModelConfig& model, int ranks) {
  const auto require = [&](bool good, const char* what, std::int64_t count, const char* into) {
    if (good) return;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("`tp={}`: model {} has {} {}, which {} ranks cannot divide{}: {} / {} "
                            "= {} each, with {} left over",
                            ranks, to_string(model), count, what, ranks, into, count, ranks,
                            count / ranks, count % ranks));
  };
  // Kernels take 16 columns at a time.
  const auto in_sixteens = [&](std::int64_t count) {
    return count % ranks == 0 && count / ranks % 16 == 0;
  };
  require(model.heads % ranks == 0, "heads", model.heads, " evenly");
  require(in_sixteens(model.width), "columns", model.width, " into multiples of 16");
  require(in_sixteens(model.vocabulary), "symbols", model.vocabulary, " into multiples of 16");
}

std::string to_string(const ModelConfig& config) {
  return fmt::format("{}x{}x{}", config.layers, config.width, config.heads);
}

ModelSpec make_spec(const ModelConfig& config) {
  ModelSpec spec{.name = to_string(config), .units = {}, .dtype = config.dtype};
  for (std::int64_t unit = 0; unit <= config.layers; ++unit) {
    spec.units.push_back(unit_spec(config, static_cast<UnitId>(unit)));
  }
  return spec;
}

namespace {

Initializer make_whole_initializer(const ModelConfig& config, std::uint64_t seed) {
  // All blocks share one table, because only the key differs.
  const auto embedding =
      std::make_shared<const std::vector<Segment>>(segments(config, kEmbeddingUnit));
  const auto block = std::make_shared<const std::vector<Segment>>(segments(config, block_unit(0)));
  return [embedding, block, seed](UnitId unit, std::uint64_t first, std::span<float> values) {
    const std::uint64_t key = mix64(mix64(seed) + unit);
    for (const Segment& segment : unit == kEmbeddingUnit ? *embedding : *block) {
      if (values.empty()) return;
      if (first >= segment.end) continue;
      const std::size_t count = std::min<std::uint64_t>(values.size(), segment.end - first);
      fill(segment, key, first, values.first(count));
      values = values.subspan(count);
      first += count;
    }
  };
}

}  // namespace

Initializer make_initializer(const ModelConfig& config, std::uint64_t seed) {
  Initializer whole = make_whole_initializer(config, seed);
  if (config.part.ranks == 1) return whole;
  const auto embedding = std::make_shared<const UnitSpec>(unit_spec(config, kEmbeddingUnit));
  const auto block = std::make_shared<const UnitSpec>(unit_spec(config, block_unit(0)));
  return [whole = std::move(whole), embedding, block, part = config.part](
             UnitId unit, std::uint64_t first, std::span<float> values) {
    for_each_run(unit == kEmbeddingUnit ? *embedding : *block, part, first, values.size(),
                 [&](const PartRun& run) {
                   whole(unit, run.whole_begin, values.subspan(run.begin - first, run.count));
                 });
  };
}

EmbeddingLayout::EmbeddingLayout(const ModelConfig& config) {
  const auto at = offsets(unit_spec(config, kEmbeddingUnit));
  wte = at[0];
  wpe = at[1];
  ln_f_weight = at[2];
  ln_f_bias = at[3];
}

BlockLayout::BlockLayout(const ModelConfig& config) {
  const auto at = offsets(unit_spec(config, block_unit(0)));
  qkv_weight = at[0];
  attention_projection_weight = at[1];
  fc_weight = at[2];
  mlp_projection_weight = at[3];
  ln_1_weight = at[4];
  ln_1_bias = at[5];
  qkv_bias = at[6];
  attention_projection_bias = at[7];
  ln_2_weight = at[8];
  ln_2_bias = at[9];
  fc_bias = at[10];
  mlp_projection_bias = at[11];
}

}  // namespace ziggurat::gpt
