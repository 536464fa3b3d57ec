// SPDX-License-Identifier: Apache-2.0
// tiers/store/store_survey.h: what one store file contains: superblocks, text, tables and blobs,
// and which of them are damaged. Nothing is written before leave_only(). This is one file's view;
// store_recovery.h decides over all files. Private to tiers/.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tiers/store/state_store_impl.h"

namespace ziggurat {

class StoreSurvey {
 public:
  /// Opens and locks `path`. `scratch` is working memory. Errors: DirectFile::open's.
  static std::unique_ptr<StoreSurvey> open(const StoreEnvironment& environment,
                                           const std::string& path);
  /// Opens `path` without the lock and only for reading, while its owner may run.
  static std::unique_ptr<StoreSurvey> open_to_look(const StoreEnvironment& environment,
                                                   const std::string& path);

  /// Reads the four superblock copies from the drive. Afterwards uuid() is known. A copy that
  /// belongs to another file (a drive wrote it to the wrong place) counts as damaged. Errors:
  /// kDataLoss if none is whole, with the fault of each; kInvalidArgument for another format
  /// version.
  Task<> read_superblocks();
  /// Checks that the file is of this rank, stripe and world. Errors: kInvalidArgument.
  void check_shape() const;
  /// Reads the text area, and the tables and blobs of both generations. Damage is noted; a damaged
  /// generation is not a candidate. Errors: kDataLoss if the file is short, or the text is lost.
  Task<> read_contents();
  /// Returns whether the file has a sealed generation 0 and nothing else. Only then can open()
  /// finish a file under construction.
  bool is_sealed_creation() const noexcept;

  StoreUuid uuid() const noexcept;
  /// Returns a whole superblock, for what all superblocks of a file have in common.
  const Superblock& identity() const;
  /// Returns the newest generation below `limit` whose superblock, table and blob are whole in this
  /// file. With one slot this is only the newest sealed one, whose records were written over those
  /// of all others.
  std::optional<std::uint64_t> newest_candidate(std::uint64_t limit) const noexcept;
  /// Returns the newest generation that any whole superblock names, even if its table is damaged.
  std::uint64_t newest_seen() const noexcept;
  std::uint64_t epoch_seen() const noexcept;
  /// Returns whether something that was once written cannot be read.
  bool damaged() const noexcept { return damaged_; }

  struct Generation {
    Superblock superblock;
    SlotTable table;
    std::vector<std::byte> blob;
  };
  const Generation& generation(std::uint64_t generation) const;
  /// Returns the generation from which `chosen` was made, if this file has it and its table and
  /// blob are whole.
  const Generation* before(std::uint64_t chosen) const noexcept;
  /// Leaves only `chosen` and the generation from which it was made: erases newer and damaged
  /// superblocks, and writes bad second copies again. Durable when it returns.
  Task<> leave_only(std::uint64_t chosen);

  const std::string& path() const noexcept { return file_->path(); }
  std::vector<std::string>& notes() noexcept { return notes_; }
  const StoreSpec& spec() const noexcept { return spec_; }
  const StoreLayout& layout() const noexcept { return layout_; }
  const std::shared_ptr<DirectFile>& file() const noexcept { return file_; }

 private:
  struct Copy {
    SuperblockVerdict verdict = SuperblockVerdict::kBlank;
    Superblock superblock;
    std::string fault;  ///< a longer text than the verdict's
    bool is_whole() const noexcept { return verdict == SuperblockVerdict::kValid; }
  };
  static const char* copy_name(int copy) { return copy == 0 ? "first copy" : "second copy"; }
  struct Side {  ///< one parity
    std::array<Copy, kSuperblockCopies> copies;
    /// The whole copies, newest first. They differ after a crash between the two writes, or if the
    /// drive lost one of them.
    std::vector<Superblock> found;
    std::optional<Generation> whole;  ///< the newest generation whose superblock, table and blob
                                      ///< are whole
    std::string fault;                ///< fault of the table or blob of the newest one

    const Superblock* newest() const noexcept { return found.empty() ? nullptr : &found.front(); }
  };

  StoreSurvey(const StoreEnvironment& environment, std::unique_ptr<DirectFile> file)
      : environment_(environment), file_(std::move(file)) {}
  Task<Copy> read_copy(unsigned parity, int copy);
  void reject_foreign_copies();
  bool fits(const Superblock& superblock) const noexcept;
  void collect(unsigned parity);
  struct Rewrite {
    std::uint64_t offset_bytes;
    std::uint64_t region_bytes;
    std::vector<std::byte> bytes;  ///< followed by zeros
  };
  std::vector<Rewrite> rewrites(std::uint64_t chosen) const;
  std::string faults() const;
  void require_superblock() const;
  void note_overwriting();
  bool overwritten(std::uint64_t generation) const noexcept;
  Task<> read_text();
  Task<> read_generation(unsigned parity);
  Task<std::optional<Generation>> read_generation(const Superblock& superblock, std::string& fault);
  void judge_generation(unsigned parity);
  Task<std::vector<std::byte>> read_bytes(std::uint64_t offset, std::uint64_t size_bytes);
  Task<> write_region(std::uint64_t offset, std::span<const std::byte> bytes,
                      std::uint64_t region_bytes);

  StoreEnvironment environment_;
  std::shared_ptr<DirectFile> file_;
  std::uint64_t size_bytes_ = 0;
  std::array<Side, 2> sides_;
  std::array<bool, kSuperblockCopies> text_damaged_{};
  bool damaged_ = false;
  bool only_looks_ = false;
  std::string text_;
  StoreSpec spec_;
  StoreLayout layout_;
  std::vector<std::string> notes_;
};

}  // namespace ziggurat
