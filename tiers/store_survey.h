// SPDX-License-Identifier: Apache-2.0
// tiers/store_survey.h: what one store file says, read without changing it: superblocks, text,
// tables, blobs, and what is damaged. One rank's view; state_store_open.cc decides over all ranks.
// Private to tiers/.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tiers/state_store_impl.h"

namespace ziggurat {

class StoreSurvey {
 public:
  /// Opens and locks `path`. `fill` is working memory.
  /// Errors: DirectFile::open's.
  static std::unique_ptr<StoreSurvey> open(const StoreEnvironment& environment,
                                           const std::string& path);

  /// Reads the four superblock copies. Afterwards uuid() is known.
  /// Errors: kDataLoss if none is whole, with each one's fault; kInvalidArgument for another format
  /// version, rank or world size.
  Task<> read_superblocks();
  /// Reads the text area, and the tables and blobs of both generations. Damage is noted; a damaged
  /// generation is no candidate. Errors: kDataLoss if the file is short, the text is gone, or
  /// (slots = 1) a generation was being overwritten.
  Task<> read_contents();
  /// A sealed generation 0 and nothing else: what a file under construction must be to be finished
  /// by open().
  bool is_sealed_creation() const noexcept;

  StoreUuid uuid() const noexcept;
  /// The newest generation here that is whole and not above `bound`.
  std::optional<std::uint64_t> newest_candidate(std::uint64_t bound) const noexcept;
  /// The newest generation that any whole superblock speaks of, even if its table is damaged.
  std::uint64_t newest_seen() const noexcept;
  std::uint64_t epoch_seen() const noexcept;
  /// Something that was written once is not readable: whatever is chosen must be verified first.
  bool damaged() const noexcept { return damaged_; }

  struct Generation {
    Superblock superblock;
    SlotTable table;
    std::vector<std::byte> blob;
  };
  const Generation& generation(std::uint64_t generation) const;
  /// The two generations here are each other's neighbours in one history. Errors: kDataLoss.
  void check_chain(std::uint64_t chosen) const;
  /// Reads every record of `chosen` and compares its hash. Errors: kDataLoss, the first wrong one.
  Task<> verify_records(std::uint64_t chosen);
  /// Leaves only `chosen` and the generation it was built on: erases newer and damaged superblocks,
  /// rewrites bad second copies. Durable when it returns.
  Task<> leave_only(std::uint64_t chosen);

  const std::string& path() const noexcept { return file_->path(); }
  std::vector<std::string>& notes() noexcept { return notes_; }
  const StoreSpec& spec() const noexcept { return spec_; }
  const StoreLayout& layout() const noexcept { return layout_; }
  std::unique_ptr<DirectFile> take_file() { return std::move(file_); }
  DirectFile& file() noexcept { return *file_; }

 private:
  struct Copy {
    SuperblockVerdict verdict = SuperblockVerdict::kBlank;
    Superblock superblock;
    std::string fault;  ///< of a read that failed
  };
  struct Side {  ///< one parity
    std::array<Copy, kSuperblockCopies> copies;
    std::optional<Superblock> newest;  ///< the newest whole copy
    std::optional<Generation> whole;   ///< with its table and blob, if those are whole too
  };

  StoreSurvey(const StoreEnvironment& environment, std::unique_ptr<DirectFile> file)
      : environment_(environment), file_(std::move(file)) {}
  Task<Copy> read_copy(unsigned parity, int copy);
  void choose_newest(unsigned parity);
  struct Rewrite {
    std::uint64_t offset_bytes;
    std::uint64_t region_bytes;
    std::vector<std::byte> bytes;  ///< zeros after them
  };
  std::vector<Rewrite> rewrites(std::uint64_t chosen) const;
  const Superblock& any_superblock() const;
  std::string faults() const;
  void check_identity() const;
  void check_not_overwritten() const;
  Task<> read_text();
  Task<> read_generation(unsigned parity);
  Task<std::vector<std::byte>> read_bytes(std::uint64_t offset, std::uint64_t size_bytes);
  Task<> write_region(std::uint64_t offset, std::span<const std::byte> bytes,
                      std::uint64_t region_bytes);

  StoreEnvironment environment_;
  std::unique_ptr<DirectFile> file_;
  std::uint64_t size_bytes_ = 0;
  std::array<Side, 2> sides_;
  std::array<bool, kSuperblockCopies> text_damaged_{};
  bool damaged_ = false;
  std::string text_;
  StoreSpec spec_;
  StoreLayout layout_;
  std::vector<std::string> notes_;
};

}  // namespace ziggurat
