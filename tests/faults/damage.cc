// SPDX-License-Identifier: Apache-2.0
// tests/faults/damage.cc: a kind of bytes is drawn first, so that superblocks of a few KiB are
// struck as often as records.
#include "tests/faults/damage.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace ziggurat::faults {
namespace {

class Striker {
 public:
  Striker(const SavedState& state, Files& files, std::mt19937_64& random)
      : state_(state), files_(files), random_(random), region_(draw_region()) {
    made_.what = region_.what;
  }

  Damage strike() {
    made_.kind = static_cast<DamageKind>(below(kDamageKinds));
    std::string how;
    switch (made_.kind) {
      case DamageKind::kFlip: how = flip(); break;
      case DamageKind::kTear: how = tear(); break;
      case DamageKind::kTruncate: how = truncate(); break;
      case DamageKind::kSwap: how = one_in(4) ? swap_files() : swap_blocks(); break;
      case DamageKind::kStale: how = one_in(4) ? stale_file() : stale_blocks(); break;
    }
    made_.description = fmt::format("{}: {} of {} in {}: {}", state_.name, to_string(made_.kind),
                                    region_.what, region_.path, how);
    return std::move(made_);
  }

 private:
  std::uint64_t below(std::uint64_t end) { return end == 0 ? 0 : random_() % end; }
  bool one_in(std::uint64_t n) { return below(n) == 0; }

  const Region& draw_region() {
    std::vector<std::string> whats;
    for (const Region& region : state_.regions) {
      if (std::ranges::find(whats, region.what) == whats.end()) whats.push_back(region.what);
    }
    const std::string& what = whats[below(whats.size())];
    std::vector<const Region*> its;
    for (const Region& region : state_.regions) {
      if (region.what == what) its.push_back(&region);
    }
    return *its[below(its.size())];
  }
  std::uint64_t place() { return region_.begin + below(region_.end - region_.begin); }
  std::vector<std::byte>& bytes() { return files_.at(region_.path); }
  const std::vector<std::byte>& past() const { return state_.old.at(region_.path); }

  void touch(const std::string& path, std::uint64_t begin, std::uint64_t end) {
    made_.touched[path].push_back({begin, end});
  }
  void touch_all(const std::string& path) { touch(path, 0, UINT64_MAX); }

  /// What was there before goes over [begin, end), as far as it reaches.
  void restore_past(std::uint64_t begin, std::uint64_t end) {
    end = std::min<std::uint64_t>({end, bytes().size(), past().size()});
    touch(region_.path, begin, end);
    if (begin < end) std::memcpy(bytes().data() + begin, past().data() + begin, end - begin);
  }

  std::string flip() {
    const std::uint64_t count = 1 + below(8);
    std::string where;
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint64_t at = place();
      bytes()[at] ^= static_cast<std::byte>(1U << below(8));
      touch(region_.path, at, at + 1);
      where += fmt::format(" {}", at);
    }
    return where;
  }
  std::string tear() {
    const std::uint64_t at = place();
    const std::uint64_t end = std::min<std::uint64_t>(region_.end, bytes().size());
    const bool was_new = one_in(2);  // a file that was just made holds zeros
    if (was_new) {
      std::memset(bytes().data() + at, 0, end - at);
      touch(region_.path, at, end);
    } else {
      restore_past(at, end);
    }
    return fmt::format("from {} to {}{}", at, end, was_new ? ", zeros" : "");
  }
  std::string truncate() {
    const std::uint64_t at = place();
    bytes().resize(at);
    touch_all(region_.path);
    return fmt::format("at {}", at);
  }
  std::string stale_blocks() {
    const std::uint64_t size = std::uint64_t{1} << (4 + below(13));
    const std::uint64_t at = place() / size * size;
    restore_past(at, at + size);
    return fmt::format("{} bytes at {}", size, at);
  }
  std::string stale_file() {
    made_.whole_file = true;
    bytes() = past();
    touch_all(region_.path);
    return "the whole file";
  }

  const std::string& other_path() {
    auto at = files_.begin();
    std::advance(at, static_cast<std::ptrdiff_t>(below(files_.size())));
    return at->first;
  }
  std::string swap_blocks() {
    const std::string& path = other_path();
    std::vector<std::byte>& other = files_.at(path);
    const std::uint64_t size = std::min<std::uint64_t>(
        {std::uint64_t{1} << (3 + below(14)), other.size() / 2, bytes().size() / 2});
    if (size == 0) return "nothing";
    const std::uint64_t here = std::min(place() / size, bytes().size() / size - 1) * size;
    const std::uint64_t there = below(other.size() / size) * size;
    if (&other == &bytes() && here == there) return "nothing";
    std::swap_ranges(bytes().begin() + static_cast<std::ptrdiff_t>(here),
                     bytes().begin() + static_cast<std::ptrdiff_t>(here + size),
                     other.begin() + static_cast<std::ptrdiff_t>(there));
    touch(region_.path, here, here + size);
    touch(path, there, there + size);
    return fmt::format("{} bytes at {} and at {} of {}", size, here, there, path);
  }
  std::string swap_files() {
    const std::string& path = other_path();
    made_.whole_file = true;
    touch_all(region_.path);
    touch_all(path);
    if (path != region_.path) bytes().swap(files_.at(path));
    return "and " + path;
  }

  const SavedState& state_;
  Files& files_;
  std::mt19937_64& random_;
  const Region& region_;
  Damage made_;
};

}  // namespace

const char* to_string(DamageKind kind) {
  switch (kind) {
    case DamageKind::kFlip: return "flip";
    case DamageKind::kTear: return "tear";
    case DamageKind::kTruncate: return "truncate";
    case DamageKind::kSwap: return "swap";
    case DamageKind::kStale: return "stale";
  }
  return "?";
}

std::set<std::string> changed_paths(const SavedState& state, const Files& files,
                                    const Damage& damage) {
  std::set<std::string> changed;
  for (const auto& [path, ranges] : damage.touched) {
    const std::vector<std::byte>& was = state.now.at(path);
    const std::vector<std::byte>& is = files.at(path);
    const auto differs = [&](const Damage::Range& range) {
      const std::uint64_t end = std::min<std::uint64_t>(range.end, was.size());
      return range.begin < end &&
             std::memcmp(was.data() + range.begin, is.data() + range.begin, end - range.begin) != 0;
    };
    if (is.size() != was.size() || std::ranges::any_of(ranges, differs)) changed.insert(path);
  }
  return changed;
}

void mend(const SavedState& state, Files& files, const Damage& damage) {
  for (const auto& [path, ranges] : damage.touched) {
    const std::vector<std::byte>& was = state.now.at(path);
    std::vector<std::byte>& is = files.at(path);
    is.resize(was.size());
    for (const Damage::Range& range : ranges) {
      const std::uint64_t end = std::min<std::uint64_t>(range.end, was.size());
      if (range.begin < end)
        std::memcpy(is.data() + range.begin, was.data() + range.begin, end - range.begin);
    }
  }
}

Damage damage(const SavedState& state, Files& files, std::mt19937_64& random) {
  return Striker(state, files, random).strike();
}

}  // namespace ziggurat::faults
