// SPDX-License-Identifier: Apache-2.0
// tiers/store/store_layout.cc: computes offsets by addition, and reads and writes the text area.
#include "tiers/store/store_layout.h"

#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/strict_json.h"
#include "tiers/store/record_hash.h"

namespace ziggurat {
namespace {

/// The largest size of a file. Sums below it cannot overflow.
constexpr std::uint64_t kFileBytesMax = std::uint64_t{1} << 60;

void check_spec(const StoreSpec& spec) {
  if (spec.slots != 1 && spec.slots != 2)
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("slots is {}, but a store has 1 or 2 slots for each record", spec.slots));
  if (spec.record_bytes.empty())
    throw Error(ErrorCode::kInvalidArgument,
                "record_bytes is empty: a store needs at least one chunk");
  for (std::size_t chunk = 0; chunk < spec.record_bytes.size(); ++chunk) {
    if (spec.record_bytes[chunk] == 0 || spec.record_bytes[chunk] % kTileBytes != 0 ||
        spec.record_bytes[chunk] > kFileBytesMax / 2)
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("the record of chunk {} has {} bytes; pad records to whole tiles of {} bytes",
                      chunk, spec.record_bytes[chunk], kTileBytes));
  }
  if (spec.blob_capacity_bytes > kFileBytesMax)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("blob_capacity_bytes is {}, but no file is that long",
                            spec.blob_capacity_bytes));
  if (!spec.constant.empty() && spec.constant.size() != spec.record_bytes.size())
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("constant has {} values, but the store has {} chunks",
                            spec.constant.size(), spec.record_bytes.size()));
  if (!spec.chunks.empty() && spec.chunks.size() != spec.record_bytes.size())
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("chunks has {} numbers, but the store has {} chunks",
                            spec.chunks.size(), spec.record_bytes.size()));
}

}  // namespace

StoreLayout StoreLayout::of(const StoreSpec& spec, std::uint64_t text_bytes) {
  check_spec(spec);
  StoreLayout layout;
  layout.slots = spec.slots;
  layout.record_bytes = spec.record_bytes;
  std::uint64_t offset = 2 * kRegionBytes;  // the first copies of both superblocks
  const auto take = [&offset](std::uint64_t size_bytes) {
    const std::uint64_t begin = offset;
    if (size_bytes > kFileBytesMax - offset)
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("the store would need more than {}, but no file is that long",
                              format_bytes(kFileBytesMax)));
    offset += size_bytes;
    return begin;
  };

  layout.text_region_bytes = round_up(text_bytes, kRegionBytes);
  layout.text_offset[0] = take(layout.text_region_bytes);
  layout.table_region_bytes = round_up(spec.record_bytes.size() * kTableEntryBytes, kRegionBytes);
  for (auto& table : layout.table_offset) table = take(layout.table_region_bytes);
  layout.blob_region_bytes = round_up(spec.blob_capacity_bytes, kRegionBytes);
  for (auto& blob : layout.blob_offset) blob = take(layout.blob_region_bytes);
  layout.constant = spec.constant;
  for (ChunkId chunk = 0; chunk < spec.record_bytes.size(); ++chunk) {
    const std::uint64_t slots = spec.is_constant(chunk) ? 1 : spec.slots;
    layout.record_offsets.push_back(take(spec.record_bytes[chunk] * slots));
  }
  layout.text_offset[1] = take(layout.text_region_bytes);
  layout.file_bytes = offset + 2 * kRegionBytes;
  return layout;
}

std::uint64_t StoreLayout::superblock_offset(unsigned parity, int copy,
                                             std::uint64_t file_bytes) noexcept {
  return (copy == 0 ? 0 : file_bytes - 2 * kRegionBytes) + parity * kRegionBytes;
}

std::uint64_t StoreLayout::record_offset(ChunkId chunk, std::uint64_t generation) const noexcept {
  const bool one_slot = slots == 1 || (!constant.empty() && constant[chunk]);
  const std::uint64_t slot = one_slot ? 0 : parity_of(generation);
  return record_offsets[chunk] + slot * record_bytes[chunk];
}

std::string store_text(const StoreSpec& spec) {
  nlohmann::ordered_json text;
  text["layout"] = spec.layout;
  text["run_identity"] = spec.run_identity;
  text["numerics_fingerprint"] = spec.numerics_fingerprint;
  text["slots"] = spec.slots;
  text["blob_capacity_bytes"] = spec.blob_capacity_bytes;
  text["record_bytes"] = spec.record_bytes;
  for (const RecordFormat::Segment& segment : spec.record_format.segments())
    text["record_segments"].push_back({segment.name, segment.tile_bytes});
  if (!spec.chunks.empty()) text["chunks"] = spec.chunks;
  if (!spec.constant.empty()) text["constant"] = spec.constant;
  return text.dump();
}

namespace {

/// Reads a list with one number per chunk, each at most `max`.
template <class T>
std::vector<T> numbers_of(const JsonField& field, T max) {
  std::vector<T> numbers;
  for (const std::int64_t number : field.numbers()) {
    if (static_cast<std::uint64_t>(number) > max)
      field.refuse(fmt::format("the value {} is more than {}", number, max));
    numbers.push_back(static_cast<T>(number));
  }
  return numbers;
}

StoreSpec spec_of(const JsonField& text) {
  StoreSpec spec;
  spec.layout = text.at("layout").text();
  spec.run_identity = text.at("run_identity").text();
  spec.numerics_fingerprint = text.at("numerics_fingerprint").text();
  spec.slots = static_cast<std::uint32_t>(text.at("slots").number(UINT32_MAX));
  spec.blob_capacity_bytes = text.at("blob_capacity_bytes").number(kFileBytesMax);
  spec.record_bytes = numbers_of(text.at("record_bytes"), kFileBytesMax);
  if (text.has("record_segments")) {  // stores made before there was a choice lack this
    const JsonField its = text.at("record_segments");
    std::vector<RecordFormat::Segment> segments;
    for (std::size_t i = 0; i < its.size(); ++i)
      segments.push_back({its.at(i).at(std::size_t{0}).text(),
                          static_cast<std::uint32_t>(its.at(i).at(1).number(UINT32_MAX))});
    spec.record_format = RecordFormat(std::move(segments));
  }
  if (text.has("chunks"))
    spec.chunks = numbers_of(text.at("chunks"), std::numeric_limits<ChunkId>::max());
  if (text.has("constant")) {
    const JsonField its = text.at("constant");
    for (std::size_t i = 0; i < its.size(); ++i) spec.constant.push_back(its.at(i).truth());
  }
  return spec;
}

}  // namespace

StoreSpec parse_store_text(const std::string& text, const std::string& path) {
  const std::string place = path + ": the store's text area";
  const nlohmann::json json = parse_strict(text, place);
  try {
    return spec_of(JsonField(json, place));
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kDataLoss) throw;
    throw Error(ErrorCode::kDataLoss, fmt::format("{}: {}", place, error.what()));
  }
}

}  // namespace ziggurat
