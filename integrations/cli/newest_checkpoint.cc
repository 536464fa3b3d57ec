// SPDX-License-Identifier: Apache-2.0
// integrations/cli/newest_checkpoint.cc: rank 0 names a step, every rank proves its share of it.
#include "integrations/cli/newest_checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>

#include "base/error.h"
#include "core/checkpoint/checkpoint_save.h"
#include "integrations/cli/checkpoint_files.h"

namespace ziggurat::cli {
namespace {

/// That ranks read before they hear of each other again: one that finds damage stops all, and none
/// is taken for dead.
constexpr std::uint64_t kRankBytesAtOnce = std::uint64_t{1} << 30;
constexpr std::uint64_t kNoStep = std::numeric_limits<std::uint64_t>::max();

std::uint64_t size_of(const StatePiece& piece) {
  std::uint64_t total = 0;
  for (const HashedBytes& hashed : piece.hashed) total += hashed.size_bytes;
  return total;
}

}  // namespace

std::optional<std::string> NewestCheckpoint::find() {
  std::vector<std::uint64_t> left;
  if (ranks_.first()) left = steps();
  for (std::size_t tried = 0;; ++tried) {
    const std::uint64_t step = ranks_.all(left.empty() ? kNoStep : left.back()).front();
    if (step == kNoStep && tried == 0) return std::nullopt;
    if (step == kNoStep) {
      throw Error(ErrorCode::kDataLoss,
                  fmt::format("{}: none of its checkpoints verifies: put back a copy of one, or "
                              "begin anew with `resume=never` and another directory for "
                              "checkpoints",
                              folder_));
    }
    const std::string directory = folder_ + "/" + checkpoint_name(step);
    if (verifies(directory)) return directory;
    if (!left.empty()) left.pop_back();
  }
}

std::vector<std::uint64_t> NewestCheckpoint::steps() {
  if (!std::filesystem::is_directory(folder_)) return {};
  return runtime_.reactor.block_on(
      [](Runtime& runtime, const std::string& folder) -> Task<std::vector<std::uint64_t>> {
        const auto io = runtime.io_engine(runtime.reactor, folder);
        co_return checkpoint_steps(*io, folder);
      }(runtime_, folder_));
}

/// What any rank found; all get the same answer.
bool NewestCheckpoint::damaged(const std::string& directory, const std::string& damage) {
  std::array<char, 1024> own{};
  std::copy_n(damage.begin(), std::min(damage.size(), own.size() - 1), own.begin());
  for (const std::array<char, 1024>& its : ranks_.all(own)) {
    if (its[0] == 0) continue;
    console_.line(fmt::format("  {} does not verify and is passed over: {}", directory,
                              std::string(its.data())));
    return true;
  }
  return false;
}

bool NewestCheckpoint::verifies(const std::string& directory) {
  std::unique_ptr<CheckpointFiles> files;
  const auto damage_of = [](const std::function<void()>& work) -> std::string {
    try {
      work();
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  const std::string unreadable =
      damage_of([&] { files = std::make_unique<CheckpointFiles>(runtime_, directory); });
  if (damaged(directory, unreadable)) return false;
  CheckpointReader& reader = *files->checkpoint();
  const std::vector<StatePiece>& pieces = reader.manifest().pieces;
  std::uint64_t total = 0;
  for (const StatePiece& piece : pieces) total += size_of(piece);
  const std::uint64_t at_once = kRankBytesAtOnce * static_cast<std::uint64_t>(ranks_.count());
  std::uint64_t done = 0;
  for (std::size_t first = 0, end = 0; first < pieces.size() || first == 0; first = end) {
    std::uint64_t bytes = 0;
    while (end < pieces.size() && (end == first || bytes < at_once))
      bytes += size_of(pieces[end++]);
    const std::string damage =
        damage_of([&] { runtime_.reactor.block_on(prove_share(reader, first, end)); });
    if (damaged(directory, damage)) return false;
    done += bytes;
    console_.progress("verifying the checkpoint", done, total);
    if (end == first) break;  // no piece at all
  }
  return true;
}

/// Proves pieces [first, end), and headers with the first of them.
Task<> NewestCheckpoint::prove_share(CheckpointReader& reader, std::size_t first, std::size_t end) {
  const auto ranks = static_cast<std::size_t>(ranks_.count());
  const auto own = static_cast<std::size_t>(ranks_.rank());
  const Manifest& manifest = reader.manifest();
  for (std::size_t f = own; first == 0 && f < manifest.files.size(); f += ranks)
    co_await reader.prove_header(f);
  for (std::size_t p = first; p < end; ++p) {
    if (p % ranks == own) co_await reader.prove(manifest.pieces[p]);
  }
}

}  // namespace ziggurat::cli
