// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_process.h: runs the built `ziggurat` as a user would, and a folder to do
// it in.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace ziggurat::test {

struct Output {
  int exit_code = -1;  ///< -1 if a signal ended it
  int signal = 0;
  std::string out;  ///< standard output
  std::string err;  ///< standard error
};

using Arguments = std::vector<std::string>;
using Environment = std::map<std::string, std::string>;

/// One child; killed and reaped by the destructor if it is still there.
class Process {
 public:
  /// Starts `ziggurat arguments...` with output into files under `folder`; `environment` is added
  /// to ours.
  Process(const std::filesystem::path& folder, const Arguments& arguments,
          const Environment& environment = {});
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void signal(int number) const;
  /// Waits until `reached`; false if the child ended and it is not, or after a minute.
  bool wait_until(const std::function<bool()>& reached) const;
  /// Waits so until standard output holds `text`.
  bool wait_for_output(const std::string& text) const;
  /// Waits at most `longest`; then kills it and reports the signal.
  Output wait(std::chrono::seconds longest = std::chrono::seconds(120));
  bool ended();
  pid_t pid() const noexcept { return pid_; }
  std::string out() const;
  std::string err() const;

 private:
  std::filesystem::path out_;
  std::filesystem::path err_;
  pid_t pid_ = -1;
  int status_ = 0;
};

Output ziggurat(const std::filesystem::path& folder, const Arguments& arguments,
                const Environment& environment = {});

/// A new empty folder in the working directory (the build tree: a real filesystem), removed by the
/// destructor.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const noexcept { return path_; }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

std::string contents(const std::filesystem::path& path);
void write_file(const std::filesystem::path& path, const std::string& text);

/// English-looking text, the same every time, long enough for the tiny model.
std::string sample_text();

/// "train" with a model that trains in a second: 2 blocks of 64, budgets it just fits, loss bits
/// on.
Arguments tiny_train(const TemporaryFolder& folder, const std::string& store, int steps);
Arguments operator+(Arguments left, const Arguments& right);

/// Step -> bits, from "step N loss-bits 0x........" lines; a step printed twice must have the same
/// bits (checked).
std::map<int, std::string> loss_bits(const std::string& out);
/// The same by attempt, from "step N attempt M loss-bits 0x........" lines: runs with a loss scale.
std::map<int, std::string> attempt_bits(const std::string& out);

}  // namespace ziggurat::test
