// SPDX-License-Identifier: Apache-2.0
// core/plan/machine_profile.h: the measured speeds of a machine's drives, optimizer and cores.
// `ziggurat bench io` and `ziggurat profile --measure` write them to a small file, and planning
// reads it.
//
// The file is JSON with a version. An unknown version or key is an error, because a misread figure
// would give a wrong plan without any message. Files of before "compute" was there have none. The
// one foreign key is "aio", the block that DeepSpeed reads from its own configuration: so the same
// file serves both.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ziggurat {

/// The speeds of one drive, measured under one path. Rates are in GB/s (1e9 bytes); 0 if not
/// measured.
struct DriveProfile {
  std::string path;         ///< the absolute path that the benchmark was given
  std::string device;       ///< "/dev/nvme0n1p2"
  std::string filesystem;   ///< "ext4"
  std::string engine;       ///< "io_uring (...)": the engine that moved the bytes
  std::string measured_at;  ///< ISO 8601, UTC
  double read_gb_per_s = 0;
  double write_gb_per_s = 0;
  double mix_gb_per_s = 0;    ///< half reads, half writes; both are counted
  double sweep_gb_per_s = 0;  ///< the optimizer's pass; reads and writes are both counted
  std::uint64_t block_bytes = 0;
  std::uint64_t queue_depth = 0;
  /// Returns the rate of the optimizer's pass, reads and writes together; without it that of the
  /// mix.
  double bytes_per_s() const noexcept {
    return 1e9 * (sweep_gb_per_s > 0 ? sweep_gb_per_s : mix_gb_per_s);
  }
  /// Returns how many bytes must be in flight to reach these rates.
  std::uint64_t outstanding_bytes() const noexcept { return block_bytes * queue_depth; }
  /// Doubts about the figures: "short", "unsteady", "small" (integrations/measure/verdict.h).
  std::vector<std::string> flags;
};

/// The block "aio" of DeepSpeed's configuration, with its six keys and their meanings.
struct DeepSpeedAio {
  std::uint64_t block_size = 1'048'576;
  std::uint64_t queue_depth = 8;
  std::uint64_t intra_op_parallelism = 1;
  bool single_submit = false;
  bool overlap_events = true;
  bool use_gds = false;
};

/// What the machine's cores compute and move, all of them together. Products are of bf16 numbers
/// unless it says otherwise, in 1e9 operations a second; a multiplication and an addition are two.
struct ComputeProfile {
  std::string measured_at;  ///< ISO 8601, UTC
  std::uint64_t threads = 0;
  double layer_gflop_per_s = 0;       ///< products of a layer, whose sides are multiples of 8
  double layer_fp32_gflop_per_s = 0;  ///< the same of fp32 numbers; older profiles have none
  double unaligned_gflop_per_s = 0;   ///< the same with a side that is none, like a vocabulary's
  /// What such products take beside, however many rows they have: bytes of weights a second; older
  /// profiles have none.
  double weights_gb_per_s = 0;
  double attention_gflop_per_s = 0;  ///< attention's products, with its softmax
  double pass_gb_per_s = 0;          ///< passes over memory; reads and writes are both counted
  double copy_gb_per_s = 0;          ///< bytes that one thread copies
  /// What a layer has beside both: norms, activations and residuals, by the bytes that planning
  /// counts of them (layer_time()); older profiles have none.
  double kernels_gb_per_s = 0;
};

struct MachineProfile {
  static constexpr int kVersion = 1;

  std::string cpu_model;
  std::string kernel;                ///< "6.1.0-18-amd64"
  double host_adam_gb_per_s = 0;     ///< host memory traffic of AdamW on all workers; 0 if unknown
  std::vector<DriveProfile> drives;  ///< one for each path
  std::optional<ComputeProfile> compute;
  std::optional<DeepSpeedAio> aio;

  /// Replaces the drive that has the same path, or adds `drive` at the end.
  void set_drive(DriveProfile drive);
  const DriveProfile* find(std::string_view path) const noexcept;
  /// Returns the drive whose path is `path` or the nearest folder above it; null if there is none.
  const DriveProfile* under(const std::string& path) const;
};

/// Reads a profile from text. Errors: kInvalidArgument naming `name`, the key and what is wrong
/// with it.
MachineProfile parse_profile(std::string_view text, const std::string& name);
/// Reads the file at `path`; nullopt if it does not exist. Errors: errno's, and parse_profile()'s.
std::optional<MachineProfile> read_profile(const std::string& path);

/// Reads the profile at default_profile_path(); nullopt if it does not exist or the path is not
/// known.
std::optional<MachineProfile> read_default_profile();

/// Returns the profile as pretty-printed JSON with a newline at the end.
std::string to_json_text(const MachineProfile& profile);
/// Writes the profile to a temporary file beside `path` (mode 0600), flushes it and renames it.
/// Missing folders are made with mode 0700. Errors: errno's, with the path.
void write_profile(const MachineProfile& profile, const std::string& path);

/// Returns $XDG_CONFIG_HOME/ziggurat/profile.json, or ~/.config/ziggurat/profile.json. Errors:
/// kInvalidArgument if neither XDG_CONFIG_HOME nor HOME is set.
std::string default_profile_path();

}  // namespace ziggurat
