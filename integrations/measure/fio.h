// SPDX-License-Identifier: Apache-2.0
// integrations/measure/fio.h: does the same work with fio, on the same file and in fio's fastest
// fair way: io_uring, fixed buffers and files, direct I/O, and blocks of our size in huge pages.
//
// fio's default buffers are 4 KiB pages, which understate a drive by up to 2.5 times, so that being
// faster than fio would prove nothing. Where the administrator reserved no huge pages, fio gets
// transparent ones through its C library (GLIBC_TUNABLES); how() says which it has.
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
  /// Finds the installed fio, and runs `probe` once to find out which memory it can have. None if
  /// there is no fio or it cannot read the file; `why` then has the reason.
  static std::optional<Fio> find(const FioJob& probe, std::string& why);

  /// Runs the job in a child that ends with this process. Errors: kUnavailable with the words of
  /// fio.
  FioFigure run(const FioJob& job) const;

  const std::string& version() const noexcept { return version_; }
  /// Returns how fio does its work, such as "fio-3.33 uses io_uring, direct I/O, a registered file
  /// and fixed buffers in 2 MiB huge pages (mmaphuge)".
  std::string how() const;

 private:
  enum class Memory : std::uint8_t { kHuge, kTransparent };
  std::string version_;
  Memory memory_ = Memory::kHuge;
};

/// Reads the figures in fio's JSON. Errors: kUnavailable if the text is not what fio writes.
FioFigure parse_fio(const std::string& json, const FioJob& job);

}  // namespace ziggurat::measure
