// SPDX-License-Identifier: Apache-2.0
// core/plan/machine_profile.h: what a machine's drives and optimizer were measured to do: the small
// file that `ziggurat bench io` writes and planning reads.
//
// JSON, versioned, strict: an unknown version or key is an error, since a misread figure plans
// wrongly without a word. The one key that is not ours is "aio", the block that DeepSpeed reads
// from its own configuration, so that the same file serves both.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ziggurat {

/// One drive under one path. Rates are GB/s (1e9 bytes); 0: not measured.
struct DriveProfile {
  std::string path;         ///< as given to the benchmark, absolute
  std::string device;       ///< "/dev/nvme0n1p2"
  std::string filesystem;   ///< "ext4"
  std::string engine;       ///< "io_uring (...)": what moved the bytes
  std::string measured_at;  ///< ISO 8601, UTC
  double read_gb_per_s = 0;
  double write_gb_per_s = 0;
  double mix_gb_per_s = 0;    ///< half reads, half writes, both counted
  double sweep_gb_per_s = 0;  ///< the optimizer's pass, reads and writes counted
  std::uint64_t block_bytes = 0;
  std::uint64_t queue_depth = 0;
  /// Bytes in flight that reach these rates.
  std::uint64_t outstanding_bytes() const noexcept { return block_bytes * queue_depth; }
  /// Doubts about the figures: "short", "unsteady", "small" (integrations/measure/verdict.h).
  std::vector<std::string> flags;
};

/// The block that DeepSpeed's configuration calls "aio"; its six keys, its meanings.
struct DeepSpeedAio {
  std::uint64_t block_size = 1'048'576;
  std::uint64_t queue_depth = 8;
  std::uint64_t intra_op_parallelism = 1;
  bool single_submit = false;
  bool overlap_events = true;
  bool use_gds = false;
};

struct MachineProfile {
  static constexpr int kVersion = 1;

  std::string cpu_model;
  std::string kernel;                ///< "6.1.0-18-amd64"
  double host_adam_gb_per_s = 0;     ///< host memory traffic of AdamW on all workers; 0: unknown
  std::vector<DriveProfile> drives;  ///< one a path
  std::optional<DeepSpeedAio> aio;

  /// Puts `drive` in the place of the one with its path, or at the end.
  void set_drive(DriveProfile drive);
  const DriveProfile* find(std::string_view path) const noexcept;
};

/// Errors (both): kInvalidArgument naming `name`, the key and what is wrong with it.
MachineProfile parse_profile(std::string_view text, const std::string& name);
/// nullopt if there is no such file. Errors: errno's, and parse_profile()'s.
std::optional<MachineProfile> read_profile(const std::string& path);

/// The one at default_profile_path(); nullopt also where no such path is known.
std::optional<MachineProfile> read_default_profile();

/// Pretty-printed, with a newline at the end.
std::string to_json_text(const MachineProfile& profile);
/// Through a temporary file beside it, flushed and renamed, mode 0600; folders are made (0700).
/// Errors: errno's, with the path.
void write_profile(const MachineProfile& profile, const std::string& path);

/// $XDG_CONFIG_HOME/ziggurat/profile.json, or ~/.config/ziggurat/profile.json.
/// Errors: kInvalidArgument where neither XDG_CONFIG_HOME nor HOME is set.
std::string default_profile_path();

}  // namespace ziggurat
