// SPDX-License-Identifier: Apache-2.0
// integrations/c/checkpoint_json.cc: reads what an embedder says of a checkpoint in JSON.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "integrations/c/embedded_checkpoint.h"
#include "integrations/c/wrong.h"

namespace ziggurat {
namespace {

using nlohmann::json;
using Shape = std::vector<std::int64_t>;

/// Calls `read` with the parsed text. An error of nlohmann::json is the caller's mistake.
template <class Read>
auto parsed(const char* what, std::string_view text, const Read& read) {
  try {
    return read(json::parse(text));
  } catch (const json::exception& error) {
    throw wrong(
        fmt::format("{} is not the JSON that ziggurat.h describes: {}", what, error.what()));
  }
}

bool is_shape(const Shape& shape) {
  return std::ranges::all_of(shape, [](std::int64_t size) { return size > 0; });
}

/// Returns `count` elements of a tensor of `shape`, from the place that `its` names.
TensorPiece part_of(const json& its, std::string name, Shape shape, std::uint64_t count) {
  TensorPiece part{.name = std::move(name), .shape = std::move(shape), .boxes = {}};
  if (!is_shape(part.shape))
    throw wrong(fmt::format("'{}' has a dimension below 1: give 1 or more", part.name));
  const std::uint64_t whole = whole_box(part.shape).count();
  if (its.contains("first")) {
    const auto first = its.at("first").get<std::uint64_t>();
    if (first > whole || count > whole - first) {
      throw wrong(fmt::format("'{}': elements {} to {} were named, but the parameter has only {}",
                              part.name, first, first + count, whole));
    }
    part.boxes = boxes_of(part.shape, first, count);
    return part;
  }
  TensorBox box{.offsets = its.at("offsets").get<Shape>(), .shape = its.at("box").get<Shape>()};
  bool inside = box.offsets.size() == part.shape.size() && box.shape.size() == part.shape.size() &&
                is_shape(box.shape);
  for (std::size_t d = 0; inside && d < part.shape.size(); ++d) {
    inside = box.offsets[d] >= 0 && box.offsets[d] <= part.shape[d] &&
             box.shape[d] <= part.shape[d] - box.offsets[d];
  }
  if (!inside) throw wrong(fmt::format("'{}': a box lies outside of the parameter", part.name));
  if (box.count() != count)
    throw wrong(fmt::format("'{}': a box has {} elements, but it must have {}", part.name,
                            box.count(), count));
  part.boxes.push_back(std::move(box));
  return part;
}

EmbeddedSave::Part saved_part(const json& its, const std::vector<EmbeddedSave::Param>& params,
                              std::uint64_t count) {
  if (its.is_null()) return {};
  const auto index = its.at("param").get<std::size_t>();
  if (index >= params.size())
    throw wrong(
        fmt::format("a part names parameter {}, but \"params\" has only {}", index, params.size()));
  return {.param = index, .part = part_of(its, params[index].name, params[index].shape, count)};
}

EmbeddedSave::Param param_of(const json& its) {
  EmbeddedSave::Param param{.name = its.at("name").get<std::string>(),
                            .shape = its.at("shape").get<Shape>(),
                            .trained = its.at("trained").get<bool>()};
  if (!is_shape(param.shape))
    throw wrong(fmt::format("'{}' has a dimension below 1: give 1 or more", param.name));
  if (param.trained) return param;
  const std::optional<DType> dtype = parse_dtype(its.at("dtype").get<std::string>());
  if (!dtype)
    throw wrong(fmt::format("'{}' has the unknown type {}: give bf16, fp16 or fp32", param.name,
                            its.at("dtype").dump()));
  param.type = tensor_type(*dtype);
  return param;
}

EmbeddedSave::Other other_of(const json& its, const EmbeddedSave& save) {
  const auto engine = its.at("engine").get<std::size_t>();
  if (engine >= save.engines.size())
    throw wrong(fmt::format("content: \"others\" names engine {}, but options.engines has only {}",
                            engine, save.engines.size()));
  EmbeddedSave::Other other{
      .engine = engine,
      .rank = its.at("rank").get<int>(),
      .name = its.at("name").get<std::string>(),
      .part = saved_part(its, save.params, its.at("count").get<std::uint64_t>())};
  if (!save.params[other.part.param].trained)
    throw wrong(fmt::format(
        "content: \"others\" names '{}' of an engine, but \"params\" says that it is not trained",
        other.name));
  return other;
}

StateContent content_of(const json& its) {
  StateContent content;
  content.model = its.at("model").get<std::string>();
  const std::optional<DType> dtype = parse_dtype(its.at("dtype").get<std::string>());
  if (!dtype)
    throw wrong(fmt::format("content: \"dtype\" is {}, which is not known: give bf16, fp16 or fp32",
                            its.at("dtype").dump()));
  content.dtype = *dtype;
  content.step = its.at("step").get<std::uint64_t>();
  content.layout.placement = its.at("placement").get<std::string>();
  for (const auto& [name, value] : its.at("resume").items()) content.resume[name] = value.dump();
  return content;
}

}  // namespace

EmbeddedSave EmbeddedSave::parse(std::string_view text, std::span<EmbeddedEngine* const> engines,
                                 std::span<const TypedSpan<std::byte>> memory) {
  return parsed("content", text, [&](const json& its) {
    EmbeddedSave save;
    save.folder = its.at("folder").get<std::string>();
    save.retention = {.keep_last = its.at("keep_last").get<std::uint64_t>(),
                      .keep_every = its.at("keep_every").get<std::uint64_t>(),
                      .keep_best = its.value("keep_best", false)};
    save.content = content_of(its);
    for (const json& param : its.at("params")) save.params.push_back(param_of(param));
    const json& parts = its.at("engines");
    const json& untrained = its.at("values");
    if (engines.empty() || parts.size() != engines.size() || untrained.size() != memory.size())
      throw wrong(
          fmt::format("content: \"engines\" has {} lists for {} engines, and \"values\" has {} "
                      "parts for {} values: give at least one engine, one list for each engine and "
                      "one part for each of the values",
                      parts.size(), engines.size(), untrained.size(), memory.size()));
    for (std::size_t e = 0; e < engines.size(); ++e) {
      Engine& engine = save.engines.emplace_back(Engine{.engine = engines[e], .parts = {}});
      if (parts[e].size() != engines[e]->trained_count())
        throw wrong(
            fmt::format("content: {} parts were given for an engine of {} trained "
                        "parameters: give one for each",
                        parts[e].size(), engines[e]->trained_count()));
      for (std::size_t p = 0; p < parts[e].size(); ++p) {
        engine.parts.push_back(saved_part(parts[e][p], save.params, engines[e]->count_of(p)));
        const Part& part = engine.parts.back();
        if (!part.part.boxes.empty() && !save.params[part.param].trained)
          throw wrong(fmt::format(
              "content: '{}' belongs to an engine, but \"params\" says that it is not trained",
              part.part.name));
      }
    }
    for (std::size_t v = 0; v < memory.size(); ++v) {
      const Part part = saved_part(untrained[v], save.params, memory[v].count());
      const bool given = !part.part.boxes.empty();
      if (given && save.params[part.param].trained)
        throw wrong(
            fmt::format("content: \"values\" names '{}', which \"params\" calls trained: its "
                        "values belong to an engine",
                        part.part.name));
      if (given && save.params[part.param].type != tensor_type(memory[v].dtype))
        throw wrong(fmt::format("content: the values of '{}' are {}, but \"params\" calls them {}",
                                part.part.name, to_string(tensor_type(memory[v].dtype)),
                                to_string(save.params[part.param].type)));
      save.values.push_back({.part = part, .memory = {memory[v].dtype, memory[v].bytes}});
    }
    save.stall_max_s = its.value("stall_max", save.stall_max_s);
    save.bandwidth_bytes_per_s = its.value("bandwidth", std::uint64_t{0});
    save.spare_bytes = its.value("memory", std::uint64_t{0});
    save.widened = its.value("widened", false);
    save.alone = its.value("alone", false);
    if (!save.alone && !its.value("others", json::array()).empty())
      throw wrong("content: \"others\" was given without \"alone\": set \"alone\" to true");
    if (!save.alone) return save;
    for (const json& other : its.at("others")) save.others.push_back(other_of(other, save));
    return save;
  });
}

EmbeddedParts EmbeddedParts::parse(std::string_view text, std::span<const std::uint64_t> counts) {
  return parsed("load", text, [&](const json& its) {
    EmbeddedParts all{.parts = {},
                      .steps = its.at("steps").get<std::vector<std::uint64_t>>(),
                      .weights_only = its.at("weights_only").get<bool>()};
    const json& places = its.at("parts");
    if (places.size() != counts.size() || all.steps.size() != counts.size()) {
      throw wrong(
          fmt::format("load: {} parts and {} counts of steps were given for {} parameters: give "
                      "one of each for every parameter",
                      places.size(), all.steps.size(), counts.size()));
    }
    for (std::size_t p = 0; p < counts.size(); ++p) {
      if (places[p].is_null()) {
        all.parts.emplace_back();
      } else {
        all.parts.push_back(part_of(places[p], places[p].at("name").get<std::string>(),
                                    places[p].at("shape").get<Shape>(), counts[p]));
      }
    }
    return all;
  });
}

}  // namespace ziggurat
