// SPDX-License-Identifier: Apache-2.0
// integrations/cli/json_report.h: writes the file of --json: {"run": {...}, "steps": [...],
// "total": {...}}.
//
// The file is valid JSON after every step, and each step is one write, so that the report of a
// killed run has its figures too. A failed write does not end the run: it is reported once, and the
// file stays as it was after the previous step.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace ziggurat::cli {

class JsonReport {
 public:
  /// Replaces the file `path`. `run` is what is known before the first step. Errors: system errors
  /// naming the path.
  JsonReport(std::string path, const nlohmann::json& run);
  ~JsonReport();
  JsonReport(const JsonReport&) = delete;
  JsonReport& operator=(const JsonReport&) = delete;

  void add_step(const nlohmann::json& step);
  void finish(const nlohmann::json& total);
  /// Returns whether everything that was added is in the file.
  bool whole() const noexcept { return whole_; }

 private:
  int put(const std::string& text) const;
  void give_up(int error_number, bool training_goes_on);

  std::string path_;
  int fd_;
  std::uint64_t end_ = 0;  // offset of the next step, over the closing brackets
  bool first_ = true;
  bool whole_ = true;
};

}  // namespace ziggurat::cli
