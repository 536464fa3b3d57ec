// SPDX-License-Identifier: Apache-2.0
// core/plan/machines/machine.h: a machine as planning sees it: its GPUs, their links, host memory,
// drives and network.
//
// Named machines have figures that their makers publish; what share of a figure programs reach is
// in Reach, measured once. A machine can also be a JSON file with these names, or "this" one, of
// which `ziggurat profile --measure` has written down what it does. Pure data but for
// find_machine(), which may read a file.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace ziggurat {

/// The shares of published figures that kernels reach. They come from one set of measured runs, 720
/// iterations of GPT on one node of A100 (VIA-Research/vTrain, data/, commit f8dda84), and hold for
/// all machines here until one is measured itself.
struct Reach {
  double product = 0.81;    ///< of matrix products whose tiles fill all processors
  double unaligned = 0.33;  ///< of that, where a side is no multiple of 8 elements
  double stream = 0.70;     ///< of memory bandwidth, in passes over long tensors
  double scores = 0.41;     ///< of memory bandwidth, in softmax and dropout of attention's scores
  double network = 0.80;    ///< of a network's figure
  double host = 0.80;       ///< of a node's memory bandwidth, in an update on its cores; assumed
  double flash = 0.50;  ///< of products' figure, in attention without scores (Dao 2023, figure 5)
};

struct Machine {
  std::string name;
  std::string figures;  ///< where the figures are from
  int gpus = 1;         ///< of one node
  double device_bytes = 0;
  double flops = 0;             ///< of 16-bit products, dense, a second
  double fp32_flops = 0;        ///< of fp32 products; 0 if not known
  double device_bandwidth = 0;  ///< bytes a second of device memory
  int processors = 108;         ///< that share the tiles of a product
  double peer_bandwidth = 0;    ///< bytes a second of a ring among the node's GPUs
  double link_bandwidth = 0;    ///< bytes a second between host and one GPU, each direction
  double host_bytes = 0;
  double host_bandwidth = 0;  ///< bytes a second of the node's memory, reads and writes together
  double drive_bytes = 0;
  double drive_bandwidth = 0;    ///< bytes a second of the node's drives, reads and writes together
  double network_bandwidth = 0;  ///< bytes a second of a node, each direction; 0 for a single node
  bool one_memory = false;       ///< the device is the host's cores, so that both share host_bytes
  int threads = 0;               ///< of these cores, if it is; 0 if not known
  /// Bytes a second of what a layer has beside products and attention; 0: as device memory streams.
  double kernel_bandwidth = 0;
  double weight_bandwidth = 0;  ///< bytes of weights that cores put in order a second; 0: at once
  double attention_block =
      0;  ///< queries that see all keys up to the last one's; 0: their own alone
  Reach reach;
};

std::span<const Machine> named_machines();
std::string machine_names();

/// Returns the machine of that name, or reads the JSON file at that path; "this" is this_machine().
/// Errors: kInvalidArgument listing the names, or naming the file's key; errno's.
Machine find_machine(const std::string& text);

/// Reads a machine from JSON; what is not there is as in `base`, which "like" names. Errors:
/// kInvalidArgument naming `place` and the key.
Machine parse_machine(std::string_view text, const std::string& place);

/// The queries of a block of the reference trainer's attention (integrations/gpt/attention.h).
inline constexpr int kAttentionBlock = 128;

struct MachineProfile;

/// The room of a machine, which its profile does not have.
struct MachineRoom {
  double memory_bytes = 0;
  double drive_bytes = 0;
};

/// Returns the cores of a measured machine as a machine with one device. Errors: kInvalidArgument
/// if the profile has no figures of them.
Machine machine_of_profile(const MachineProfile& profile, const MachineRoom& room);

/// Returns a machine whose device is the host's cores as `processes` see it that share them: as one
/// with so many devices, each an equal part of the cores.
Machine shared_by(Machine machine, int processes);

/// Returns such a machine if each process computes with `threads`, or as it is if it has no more:
/// others than those that were measured add nothing.
Machine with_threads(Machine machine, int threads);

/// Returns the machine as a training in fp32 sees it: with its speed of fp32 products, and memory
/// that moves half as many elements a second. Errors: kInvalidArgument if that speed is not known.
Machine in_fp32(Machine machine);

/// Returns this machine, from the profile at its default path. Errors: kInvalidArgument if it has
/// not been measured; read_profile()'s.
Machine this_machine();

}  // namespace ziggurat
