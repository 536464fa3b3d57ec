// SPDX-License-Identifier: Apache-2.0
// integrations/measure/fio.h: the same work by fio, on the same file, at fio's fair best: io_uring,
// fixed buffers and files, direct, blocks of our size in huge pages.
//
// fio's default buffers are 4 KiB pages, which understate a drive by up to 2.5 times: beating those
// proves nothing. Where the administrator reserved no huge pages, fio gets transparent ones through
// its C library (GLIBC_TUNABLES); how() says which.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "integrations/measure/measurement.h"

namespace ziggurat::measure {

struct FioFigure {
  double gb_per_s = 0;
  double cpu_s_per_gb = 0;  ///< fio's usr_cpu + sys_cpu
  double p50_us = 0;
  double p99_us = 0;
  std::uint32_t depth = 0;
  std::uint64_t write_bytes = 0;
};

struct FioJob {
  IoMix kind = IoMix::kRead;
  std::string path;
  std::uint64_t size_bytes = 0;
  double seconds = 0;
  std::uint32_t depth = 0;
  std::uint32_t block_bytes = 0;  ///< whole KiB
  bool read_only = false;         ///< fio is told to refuse writes
};

class Fio {
 public:
  /// fio as installed, tried once on `probe` for the memory it can have; nullopt if there is none
  /// or it cannot read the file, with the reason in `why`.
  static std::optional<Fio> find(const FioJob& probe, std::string& why);

  /// Runs the job in a child that dies with us. Errors: kUnavailable with fio's own words.
  FioFigure run(const FioJob& job) const;

  const std::string& version() const noexcept { return version_; }
  /// "io_uring, direct, registered file, fixed buffers in 2 MiB huge pages".
  std::string how() const;

 private:
  enum class Memory : std::uint8_t { kHuge, kTransparent };
  std::string version_;
  Memory memory_ = Memory::kHuge;
};

/// What fio's JSON says. Errors: kUnavailable if it is not what fio writes.
FioFigure parse_fio(const std::string& json, const FioJob& job);

}  // namespace ziggurat::measure
