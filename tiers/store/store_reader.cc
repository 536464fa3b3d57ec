// SPDX-License-Identifier: Apache-2.0
// tiers/store/store_reader.cc: surveys every file as its rank would, and makes one choice over all
// of them.
#include "tiers/store/store_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "tiers/store/store_survey.h"

namespace ziggurat {
namespace {

/// How often a file is read in which something is wrong. A transfer may fail although the medium is
/// whole, and to believe the failure would cost a generation.
constexpr int kFileLooks = 2;
/// How often a store is read whose owner makes generations meanwhile, before it is reported as
/// damaged.
constexpr int kLooks = 20;

/// The quorum of the rank whose file is read; agrees with itself.
class Looker final : public Quorum {
 public:
  Looker(int rank, int world_size) : rank_(rank), world_size_(world_size) {}
  int rank() const noexcept override { return rank_; }
  int world_size() const noexcept override { return world_size_; }
  Task<std::uint64_t> min(std::uint64_t value) override { co_return value; }
  Task<std::uint64_t> max(std::uint64_t value) override { co_return value; }
  Task<> barrier() override { co_return; }

 private:
  int rank_;
  int world_size_;
};

std::string text_of(std::span<const StripePlace> places) {
  std::string text;
  for (const StripePlace& place : places) text += (text.empty() ? "" : ",") + place.directory;
  return text;
}

}  // namespace

struct StoreReader::File {
  File(int rank_, int world_size) : rank(rank_), looker(rank_, world_size) {}
  int rank;
  Looker looker;
  std::optional<StoreEnvironment> environment;
  std::string path;
  std::unique_ptr<StoreSurvey> survey;
  std::uint64_t newest_seen = 0;  ///< newest generation when the file was read
};

StoreReader::StoreReader(Reactor& reactor, std::vector<StripePlace> places)
    : reactor_(reactor),
      places_(std::move(places)),
      scratch_(
          HostMappingOptions{.owner = "store reader", .size_bytes = kMiB, .huge_pages = false}) {}

StoreReader::~StoreReader() = default;

bool StoreReader::is_there(std::span<const StripePlace> places) {
  // True also while another store takes its place, because the first rank's file is replaced by a
  // rename.
  return std::ranges::any_of(places, [](const StripePlace& place) {
    return place.io.exists(place.directory + "/" + StateStore::file_name(0));
  });
}

Task<std::optional<StoreSpec>> StoreReader::spec_of(Reactor& reactor,
                                                    std::vector<StripePlace> places, int rank) {
  StoreReader reader(reactor, std::move(places));
  const std::string name = StateStore::file_name(rank);
  for (int look = 1;; ++look) {
    reader.files_.clear();
    const StoreSuccession succession(reader.reactor_, reader.places_);
    reader.decided_ = co_await succession.decided();
    const StripePlace* const place = reader.place_with(name);
    if (place == nullptr) co_return std::nullopt;
    std::exception_ptr damage;
    bool moved = false;
    try {
      std::unique_ptr<File>& file = reader.files_.emplace_back();
      file = reader.begin_look({.rank = rank, .stripe = 0, .stripes = 1}, *place, name);
      co_await file->survey->read_superblocks();
      file->newest_seen = file->survey->newest_seen();
      co_await file->survey->read_contents();
      co_return file->survey->spec();
    } catch (const Error& error) {
      moved = error.native() == ENOENT && !reader.files_.back();
      if (error.code() != ErrorCode::kDataLoss && !moved) throw;
      damage = std::current_exception();
    }
    if (look == kLooks) std::rethrow_exception(damage);
    if (look < kFileLooks || moved || co_await reader.owner_went_on()) continue;
    std::rethrow_exception(damage);
  }
}

Task<std::unique_ptr<StoreReader>> StoreReader::open(Reactor& reactor,
                                                     std::vector<StripePlace> places) {
  std::unique_ptr<StoreReader> reader(new StoreReader(reactor, std::move(places)));
  for (int look = 1;; ++look) {
    std::exception_ptr damage;
    bool moved = false;  // renamed since it was found
    try {
      co_await reader->look_at_all();
    } catch (const Error& error) {
      moved = error.native() == ENOENT && !reader->files_.empty() && !reader->files_.back();
      if (error.code() != ErrorCode::kDataLoss && !moved) throw;
      damage = std::current_exception();
    }
    if (!damage) break;
    if (look == kLooks) std::rethrow_exception(damage);
    if (!moved && !co_await reader->owner_went_on()) std::rethrow_exception(damage);
  }
  reader->find_homes();
  co_return std::move(reader);
}

/// Finds the files. Ranks and stripes are counted from 0 as far as there are files.
Task<> StoreReader::find_files() {
  const StoreSuccession succession(reactor_, places_);
  decided_ = co_await succession.decided();
  ranks_ = 0;
  while (place_with(StateStore::file_name(ranks_)) != nullptr) ++ranks_;
  if (ranks_ == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("there is no store in {}", text_of(places_)), ENOENT);
  }
  stripes_ = 1;
  while (place_with(StateStore::file_name(0, stripes_)) != nullptr) ++stripes_;
}

/// Returns the place that has the file.
const StripePlace* StoreReader::place_with(const std::string& name) const {
  if (decided_ && std::ranges::find(*decided_, name) == decided_->end()) return nullptr;
  const auto found = std::ranges::find_if(
      places_, [&](const StripePlace& place) { return place.io.exists(path_in(place, name)); });
  return found == places_.end() ? nullptr : &*found;
}

std::string StoreReader::path_in(const StripePlace& place, const std::string& name) const {
  if (decided_) return StoreSuccession::place_of(place, name);
  return place.directory + "/" + name;
}

/// Leaves out files of ranks and drives that the first file's store does not have: a store with
/// more of them was replaced, and its files are left.
Task<> StoreReader::leave_out_strangers() {
  if (ranks_ == 1 && stripes_ == 1) co_return;
  const std::string name = StateStore::file_name(0);
  try {
    const auto first =
        begin_look({.rank = 0, .stripe = 0, .stripes = stripes_}, *place_with(name), name);
    co_await first->survey->read_superblocks();
    const Superblock& its = first->survey->identity();
    ranks_ = std::clamp(static_cast<int>(its.world_size), 1, ranks_);
    stripes_ = std::clamp(its.stripe_count, 1U, stripes_);
  } catch (const Error& error) {  // look() meets it again, and says what is wrong
    log().debug("{}: {}", name, error.what());
  }
}

Task<> StoreReader::look_at_all() {
  files_.clear();
  co_await find_files();
  co_await leave_out_strangers();
  for (int rank = 0; rank < ranks_; ++rank) {
    for (std::uint32_t stripe = 0; stripe < stripes_; ++stripe) co_await look(rank, stripe);
  }
  choose();
}

/// Returns whether the owner has made generations since the files were read. Tables and blobs are
/// written over two generations later, so in that case nothing needs to be damaged.
Task<bool> StoreReader::owner_went_on() const {
  for (const auto& file : files_) {
    if (!file) continue;                                            // it could not be opened
    if (!file->environment->io.exists(file->path)) co_return true;  // replaced by a new store
    const auto now = StoreSurvey::open_to_look(*file->environment, file->path);
    bool read = true;
    try {
      co_await now->read_superblocks();
    } catch (const Error&) {
      read = false;
    }
    if (read && now->newest_seen() > file->newest_seen) co_return true;
  }
  co_return false;
}

Task<> StoreReader::look(int rank, std::uint32_t stripe) {
  const std::string name = StateStore::file_name(rank, stripe);
  const StripePlace* place = place_with(name);
  if (place == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("none of {} has the file {}; give all directories of the store",
                            text_of(places_), name),
                ENOENT);
  }
  // Added before it is read, because owner_went_on() needs it if the read fails.
  std::unique_ptr<File>& file = files_.emplace_back();
  for (int looks = 0; looks < kFileLooks && (!file || !file->survey->notes().empty()); ++looks) {
    file = begin_look({.rank = rank, .stripe = stripe, .stripes = stripes_}, *place, name);
    co_await file->survey->read_superblocks();
    file->newest_seen = file->survey->newest_seen();
    file->survey->check_shape();
    co_await file->survey->read_contents();
  }
  if (files_.front()->survey->uuid() != file->survey->uuid()) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} and {} belong to different stores",
                                                         files_.front()->path, file->path));
  }
}

std::unique_ptr<StoreReader::File> StoreReader::begin_look(FileId id, const StripePlace& place,
                                                           const std::string& name) {
  auto file = std::make_unique<File>(id.rank, ranks_);
  file->environment.emplace(StoreEnvironment{.reactor = reactor_,
                                             .io = place.io,
                                             .ranks = file->looker,
                                             .observers = place.observers,
                                             .staging = {},
                                             .scratch = scratch_.bytes().first(kMiB),
                                             .stripe_index = id.stripe,
                                             .stripe_count = id.stripes});
  file->path = path_in(place, name);
  file->survey = StoreSurvey::open_to_look(*file->environment, file->path);
  return file;
}

/// Makes the error if no generation is in all files.
Error StoreReader::nothing_common() const {
  std::string offers;
  for (const auto& file : files_) {
    std::string of_file;
    std::uint64_t limit = SlotEntry::kNone;
    while (const auto newest = file->survey->newest_candidate(limit)) {
      of_file += fmt::format("{}{}", of_file.empty() ? "" : " and ", *newest);
      limit = *newest;
    }
    offers += fmt::format("; {} has {}", file->path, of_file.empty() ? "none" : of_file);
    for (const std::string& note : file->survey->notes()) offers += "; " + note;
  }
  return {ErrorCode::kDataLoss,
          fmt::format("no generation is whole in all files of the store in {}{}", text_of(places_),
                      offers)};
}

/// Chooses a generation as ranks do when they recover: the lowest offer is the next limit, until
/// all files offer the same generation of the same history.
void StoreReader::choose() {
  std::uint64_t limit = SlotEntry::kNone;
  for (;;) {
    std::uint64_t lowest = SlotEntry::kNone;
    std::uint64_t highest = 0;
    for (const auto& file : files_) {
      const auto newest = file->survey->newest_candidate(limit);
      if (!newest) throw nothing_common();
      lowest = std::min(lowest, *newest);
      highest = std::max(highest, *newest);
    }
    const auto lineage = [&](const std::unique_ptr<File>& file) {
      return file->survey->generation(lowest).superblock.lineage;
    };
    if (lowest == highest) {
      const std::uint64_t first = lineage(files_.front());
      const bool same =
          std::ranges::all_of(files_, [&](const auto& file) { return lineage(file) == first; });
      if (same) break;
      limit = lowest;
    } else {
      limit = lowest + 1;
    }
  }
  StoreSurvey& first = *files_.front()->survey;
  const std::uint64_t generation = *first.newest_candidate(limit);
  const StoreSurvey::Generation& chosen = first.generation(generation);
  state_ = {.generation = generation,
            .epoch = chosen.superblock.epoch,
            .slots = first.layout().slots,
            .layout = first.spec().layout,
            .run_identity = first.spec().run_identity,
            .numerics_fingerprint = first.spec().numerics_fingerprint,
            .blob = chosen.blob,
            .notes = {},
            .uuid = chosen.superblock.uuid};
  state_.notes = notes();
}

/// Returns what is damaged in any file, and which newer generation was given up because of it.
std::vector<std::string> StoreReader::notes() const {
  std::vector<std::string> all;
  if (decided_) {
    all.push_back(fmt::format(
        "the reshard of the store in {} was interrupted; the new store is read, and the next start "
        "puts it in the old one's place",
        text_of(places_)));
  }
  for (const auto& file : files_) {
    for (const std::string& note : file->survey->notes())
      all.push_back(fmt::format("{}: {}", file->path, note));
    const std::uint64_t newest = file->survey->newest_seen();
    if (newest <= state_.generation) continue;
    all.push_back(
        fmt::format("{} has generation {}, which is not whole in all files; generation {} is read",
                    file->path, newest, state_.generation));
  }
  return all;
}

void StoreReader::find_homes() {
  constexpr std::size_t kNone = SIZE_MAX;
  homes_.resize(static_cast<std::size_t>(ranks_));
  for (const auto& file : files_) {
    std::vector<Home>& homes = homes_[static_cast<std::size_t>(file->rank)];
    homes.resize(homes.size() + file->survey->spec().record_bytes.size(), {kNone, 0});
  }
  for (std::size_t f = 0; f < files_.size(); ++f) {
    const StoreSpec& spec = files_[f]->survey->spec();
    std::vector<Home>& homes = homes_[static_cast<std::size_t>(files_[f]->rank)];
    for (ChunkId chunk = 0; chunk < spec.record_bytes.size(); ++chunk) {
      const ChunkId name = spec.chunk_name(chunk);
      if (name >= homes.size() || homes[name].file != kNone)
        throw Error(ErrorCode::kDataLoss, foreign_stripe(files_[f]->path, name, homes.size()));
      homes[name] = {.file = f, .chunk = chunk};
    }
  }
}

const StoreReader::Home& StoreReader::home(int rank, ChunkId chunk) const {
  const std::vector<Home>& homes = homes_.at(static_cast<std::size_t>(rank));
  ZIGGURAT_CHECK(chunk < homes.size(), "chunk {} of {}", chunk, homes.size());
  return homes[chunk];
}

const std::string& StoreReader::layout(int rank) const noexcept {
  const std::size_t stripes = files_.size() / static_cast<std::size_t>(ranks_);
  return files_[static_cast<std::size_t>(rank) * stripes]->survey->spec().layout;
}

std::span<const std::byte> StoreReader::blob(int rank) const {
  const std::size_t stripes = files_.size() / static_cast<std::size_t>(ranks_);
  StoreSurvey& survey = *files_[static_cast<std::size_t>(rank) * stripes]->survey;
  return survey.generation(state_.generation).blob;
}

std::size_t StoreReader::chunk_count(int rank) const noexcept {
  return homes_[static_cast<std::size_t>(rank)].size();
}

std::uint64_t StoreReader::record_bytes(int rank, ChunkId chunk) const {
  const Home& its = home(rank, chunk);
  return files_[its.file]->survey->spec().record_bytes[its.chunk];
}

StateStore::Expected StoreReader::expected(int rank, ChunkId chunk) const {
  const Home& its = home(rank, chunk);
  StoreSurvey& survey = *files_[its.file]->survey;
  const SlotEntry& entry = survey.generation(state_.generation).table[its.chunk];
  const std::uint64_t made_in = survey.spec().is_constant(its.chunk) ? 0 : state_.generation;
  return {record_seed(survey.uuid(), chunk, made_in, entry.attempt), entry.hash};
}

Task<> StoreReader::read(int rank, ChunkId chunk, std::span<std::byte> record) const {
  const Home& its = home(rank, chunk);
  const StoreSurvey& survey = *files_[its.file]->survey;
  co_await survey.file()->read(survey.layout().record_offset(its.chunk, state_.generation), record,
                               IoPriority::kPrefetch);
}

Task<bool> StoreReader::overtaken(int rank, ChunkId chunk) const {
  const File& file = *files_[home(rank, chunk).file];
  if (!file.environment->io.exists(file.path)) co_return true;  // replaced by a new store
  const auto now = StoreSurvey::open_to_look(*file.environment, file.path);
  co_await now->read_superblocks();
  // If the newest generation was damaged when this reader opened the store, it was given up then,
  // and its owner has written nothing since.
  const std::uint64_t seen = file.survey->newest_seen();
  const bool given_up = file.survey->newest_candidate(SlotEntry::kNone) != seen;
  co_return now->uuid() != file.survey->uuid() ||
      now->newest_seen() > (given_up ? seen : state_.generation);
}

std::string StoreReader::record_name(int rank, ChunkId chunk) const {
  const Home& its = home(rank, chunk);
  const StoreSurvey& survey = *files_[its.file]->survey;
  return fmt::format("{}: the record of chunk {}, generation {} ({} at offset {})",
                     files_[its.file]->path, chunk, state_.generation,
                     format_bytes(survey.spec().record_bytes[its.chunk]),
                     survey.layout().record_offset(its.chunk, state_.generation));
}

Error StoreReader::corrupt_record(int rank, ChunkId chunk) const {
  return {ErrorCode::kDataLoss,
          record_name(rank, chunk) +
              " has a wrong checksum: the drive did not return what was written"};
}

}  // namespace ziggurat
