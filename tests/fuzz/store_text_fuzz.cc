// SPDX-License-Identifier: Apache-2.0
// tests/fuzz/store_text_fuzz.cc: the text of a store, its records' table and its layout among them.
#include "base/bytes.h"
#include "core/sharding/chunk_table.h"
#include "core/sharding/piece_layout.h"
#include "core/sharding/stored_records.h"
#include "tests/fuzz/fuzz_target.h"
#include "tiers/store/store_layout.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ziggurat;
  const std::string text(fuzz::text_of(data, size));
  fuzz::taken([&] {
    const StoreSpec spec = parse_store_text(text, "fuzz");
    const StoreLayout layout = StoreLayout::of(spec, text.size());
    fuzz::require(layout.record_offsets.size() == spec.record_bytes.size());
    for (std::size_t i = 0; i < layout.record_offsets.size(); ++i)
      fuzz::require(layout.record_offsets[i] + layout.record_bytes[i] <= layout.file_bytes);
  });
  fuzz::taken([&] {
    require_records(text, {.count = 64, .size_bytes = 64 * kMiB});
    const ChunkTable table = ChunkTable::of_layout(text, 0);
    fuzz::require(table.total_record_bytes() / kTileBytes >= table.chunks().size());
    const auto places = places_in(text, table.model());
    for (std::size_t u = 0; places && u < table.model().units.size(); ++u) {
      const UnitSpec& unit = table.model().units[u];
      const WholePlace& place = (*places)[u];
      if (unit.params.size() > 1) break;  // of which the numbers of places and units differ
      fuzz::require(place.name.empty() || fault_of(place, unit.count()).empty());
    }
  });
  return 0;
}
