// SPDX-License-Identifier: Apache-2.0
// integrations/measure/target.h: the file under test. It is a file of our own without a name, which
// disappears with the process, or an existing file, which is only read.
//
// Everything moves through DirectFile over the engine that the probe chose, as in training. Memory
// that is registered with the engine must outlive the target. Apart from creation, a target must be
// used on the reactor's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "aio/direct_file.h"
#include "base/runtime/reactor.h"
#include "integrations/measure/file_facts.h"
#include "integrations/measure/fill.h"

namespace ziggurat::measure {

class Target {
 public:
  /// Makes an unnamed file of `size_bytes` in the folder `path`, with its space reserved and
  /// nothing written. Errors: kInvalidArgument if `path` is not a folder; kResourceExhausted if the
  /// file does not fit.
  static std::unique_ptr<Target> create(Reactor& reactor, const std::string& path,
                                        std::uint64_t size_bytes);
  /// Opens the first `size_bytes` of `path` for reading, or all of it for 0. `path` must be a
  /// regular file, or a block device if `allow_raw_device`. Errors: kInvalidArgument naming what it
  /// is instead.
  static std::unique_ptr<Target> open(Reactor& reactor, const std::string& path,
                                      std::uint64_t size_bytes, bool allow_raw_device);

  DirectFile& file() noexcept { return *file_; }
  IoEngine& engine() const noexcept { return *engine_; }
  const std::string& label() const noexcept { return label_; }
  const DriveFacts& drive() const noexcept { return drive_; }
  std::uint64_t size_bytes() const noexcept { return size_bytes_; }
  bool ours() const noexcept { return ours_; }
  int descriptor() const;
  /// Returns a name under which another process of this user can open the file while this process
  /// has it open.
  std::string path_for_others() const;

  /// The kinds of content that the file can have.
  enum class Content : std::uint8_t { kNothing, kPages, kForeign, kRecords };
  Content content = Content::kNothing;
  Pass pass;                        ///< the newest pass over our pages
  std::uint32_t first_pass = 1;     ///< pages of older passes are gone
  std::uint64_t written_bytes = 0;  ///< written by us and by fio, in all
  std::uint64_t fill_count = 0;
  /// With kRecords: where the newest version of a record is, and its hash.
  struct Record {
    std::uint32_t slot = 0;
    std::uint64_t hash = 0;
    std::uint64_t seed = 0;  ///< of the hash
  };
  std::vector<Record> records;

 private:
  Target() = default;
  void attach(Reactor& reactor, const std::string& folder, const std::string& path,
              const OpenOptions& options);

  std::string label_;
  DriveFacts drive_;
  std::uint64_t size_bytes_ = 0;
  bool ours_ = false;
  std::unique_ptr<IoEngine> engine_;
  std::unique_ptr<DirectFile> file_;
};

}  // namespace ziggurat::measure
