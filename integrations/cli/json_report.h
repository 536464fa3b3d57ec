// SPDX-License-Identifier: Apache-2.0
// integrations/cli/json_report.h: the file of --json: {"run": {...}, "steps": [...], "total":
// {...}}.
//
// Valid JSON after every step, and each step reaches the file in one write, so that a run that was
// killed has its figures too. A report ends no run: what cannot be written is said once, and the
// file is left as it was with the step before.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace ziggurat::cli {

class JsonReport {
 public:
  /// Replaces `path`. `run` is what is known before the first step. Errors: errno's, with the path.
  JsonReport(std::string path, const nlohmann::json& run);
  ~JsonReport();
  JsonReport(const JsonReport&) = delete;
  JsonReport& operator=(const JsonReport&) = delete;

  void add_step(const nlohmann::json& step);
  void finish(const nlohmann::json& total);
  /// All that it was given is in the file.
  bool whole() const noexcept { return whole_; }

 private:
  int put(const std::string& text) const;
  void give_up(int error_number, bool training_goes_on);

  std::string path_;
  int fd_;
  std::uint64_t end_ = 0;  // where the next step goes, over the closing brackets
  bool first_ = true;
  bool whole_ = true;
};

}  // namespace ziggurat::cli
