// SPDX-License-Identifier: Apache-2.0
// core/sharding/piece_layout.cc: writes the places of pieces as JSON, and reads them back from a
// text that may be damaged.
#include "core/sharding/piece_layout.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"
#include "base/strict_json.h"
#include "core/sharding/stored_records.h"

namespace ziggurat {
namespace {

constexpr const char* kPlaces = "pieces";

/// `own` is the piece's own name, which the whole tensor mostly has too.
nlohmann::json place_json(const WholePlace& place, const std::string& own) {
  if (place.name.empty()) return nullptr;
  nlohmann::json json{{"shape", place.shape}};
  if (place.name != own) json["name"] = place.name;
  if (place.is_box()) {
    json["offsets"] = place.offsets;
    json["box"] = place.box;
  } else {
    json["first"] = place.first;
  }
  return json;
}

WholePlace place_from(const JsonField& field, const ParamSpec& param) {
  if (field.is_null()) return {};
  WholePlace place{.name = field.has("name") ? field.at("name").text() : param.name,
                   .shape = field.at("shape").numbers(),
                   .first = 0,
                   .offsets = {},
                   .box = {}};
  if (field.has("box")) {
    place.offsets = field.at("offsets").numbers();
    place.box = field.at("box").numbers();
    if (place.box.empty()) field.refuse("the piece is a box without dimensions");
  } else {
    place.first = field.at("first").number();
  }
  if (place.name.empty()) field.refuse("the piece's whole tensor has no name");
  if (const std::string fault = fault_of(place, param.count()); !fault.empty()) field.refuse(fault);
  return place;
}

}  // namespace

std::string layout_of_pieces(const std::string& layout, const ModelSpec& model) {
  const std::optional<std::vector<WholePlace>> places = places_of(model);
  const std::string marked = layout_of_pieces(layout);
  if (!places) return marked;
  nlohmann::json list = nlohmann::json::array();
  auto next = places->begin();
  for (const UnitSpec& unit : model.units) {
    if (!unit.stored()) continue;
    for (const ParamSpec& param : unit.params) list.push_back(place_json(*next++, param.name));
  }
  nlohmann::json json = nlohmann::json::parse(marked);
  json[kPlaces] = std::move(list);
  return json.dump();
}

void require_place(const ParamSpec& param) {
  if (!param.whole || param.whole->name.empty()) return;
  const std::string fault = fault_of(*param.whole, param.count());
  if (fault.empty()) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("`pieces`: parameter '{}' cannot be that part of '{}': {}", param.name,
                          param.whole->name, fault));
}

std::optional<std::vector<WholePlace>> places_of(const ModelSpec& model) {
  std::vector<WholePlace> places;
  for (const UnitSpec& unit : model.units) {
    if (!unit.stored()) continue;
    for (const ParamSpec& param : unit.params) {
      if (!param.whole) return std::nullopt;
      places.push_back(*param.whole);
    }
  }
  return places;
}

std::optional<std::vector<WholePlace>> places_in(const std::string& layout,
                                                 const ModelSpec& model) {
  constexpr const char* kLayout = "the store's layout";
  const nlohmann::json json = parse_strict(layout, kLayout);
  const JsonField top(json, kLayout);
  if (!top.has(kPlaces) || !top.at(kPlaces).value().is_array()) return std::nullopt;
  const JsonField list = top.at(kPlaces);
  std::vector<WholePlace> places;
  std::size_t count = 0;
  for (const UnitSpec& unit : model.units) count += unit.stored() ? unit.params.size() : 0;
  if (list.size() != count)
    list.refuse(fmt::format("it has {} places for {} parameters", list.size(), count));
  for (const UnitSpec& unit : model.units) {
    if (!unit.stored()) continue;
    for (const ParamSpec& param : unit.params)
      places.push_back(place_from(list.at(places.size()), param));
  }
  return places;
}

}  // namespace ziggurat
