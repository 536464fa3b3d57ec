// SPDX-License-Identifier: Apache-2.0
// core/plan/machines/named_machines.cc: machines that people rent or own, with published figures.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "core/plan/machines/machine.h"

namespace ziggurat {
namespace {

constexpr double kGB = 1e9;
constexpr double kTB = 1e12;
constexpr double kTera = 1e12;
constexpr double kGiB = 1024.0 * 1024 * 1024;

/// A GPU as its data sheet has it, with the memory that its driver reports (what is sold as 141 GB
/// is nearly as many GiB). Rings reach 0.73 of NVLink's one direction (measured on A100: 220 of 300
/// GB/s), and 0.6 of PCIe's.
struct Gpu {
  double device_gib, teraflops, gb_per_s;
  int processors;
  double nvlink_gb_per_s;  ///< one direction; 0 where there is none
  double pcie_gb_per_s;    ///< one direction
};
constexpr Gpu kA100{80, 312, 2039, 108, 300, 25};
constexpr Gpu kA100Small{40, 312, 1555, 108, 300, 25};
constexpr Gpu kH100{79.6, 989, 3350, 132, 450, 55};
constexpr Gpu kH200{140.4, 989, 4800, 132, 450, 55};
constexpr Gpu kB200{179, 2250, 8000, 148, 900, 55};
constexpr Gpu kL40s{45, 362, 864, 142, 0, 25};
constexpr Gpu kA6000{48, 155, 768, 84, 0, 25};
constexpr Gpu kRtx4090{24, 165, 1008, 128, 0, 25};
constexpr Gpu kRtx3090{24, 71, 936, 82, 0, 25};
constexpr Gpu kLaptop{8, 60, 256, 24, 0, 12};

/// What is around the GPUs of a node.
struct Around {
  double host_gb, host_gb_per_s, drive_tb, drive_gb_per_s, network_gbit_per_s;
};
constexpr Around kLargeNode{2048, 350, 30, 24, 3200};
constexpr Around kA100Node{1024, 250, 15, 12, 800};
constexpr Around kWorkstation{128, 60, 2, 6, 0};
constexpr Around kManyCards{512, 150, 4, 6, 0};
constexpr Around kOneCard{64, 60, 2, 6, 0};
constexpr Around kSmall{32, 50, 1, 4, 0};

Machine machine(const char* name, int gpus, const Gpu& gpu, const Around& around,
                const char* figures) {
  constexpr double kRingShare = 220.0 / 300;
  constexpr double kPcieRingShare = 0.6;
  Machine made;
  made.name = name;
  made.figures = figures;
  made.gpus = gpus;
  made.device_bytes = gpu.device_gib * kGiB;
  made.flops = gpu.teraflops * kTera;
  made.device_bandwidth = gpu.gb_per_s * kGB;
  made.processors = gpu.processors;
  made.link_bandwidth = gpu.pcie_gb_per_s * kGB;
  made.peer_bandwidth = (gpu.nvlink_gb_per_s > 0 ? gpu.nvlink_gb_per_s * kRingShare
                                                 : gpu.pcie_gb_per_s * kPcieRingShare) *
                        kGB;
  made.host_bytes = around.host_gb * kGB;
  made.host_bandwidth = around.host_gb_per_s * kGB;
  made.drive_bytes = around.drive_tb * kTB;
  made.drive_bandwidth = around.drive_gb_per_s * kGB;
  made.network_bandwidth = around.network_gbit_per_s / 8 * kGB;
  return made;
}

std::vector<Machine> table_of_machines() {
  const char* const dgx =
      "NVIDIA's data sheets: 16-bit products without sparsity, memory, NVLink's one direction; "
      "network of the DGX; host and drives as usual in such nodes";
  const char* const card = "NVIDIA's data sheet of the GPU; host and drive as usual beside it";
  return {
      machine("a100x8", 8, kA100, kA100Node, dgx),
      machine("a100-40gb-x8", 8, kA100Small, kA100Node, dgx),
      machine("h100x8", 8, kH100, kLargeNode, dgx),
      machine("h200x8", 8, kH200, kLargeNode, dgx),
      machine("b200x8", 8, kB200, kLargeNode, dgx),
      machine("a100", 1, kA100, kWorkstation, card),
      machine("h100", 1, kH100, kWorkstation, card),
      machine("a6000", 1, kA6000, kWorkstation, card),
      machine("l40sx8", 8, kL40s, kManyCards, card),
      machine("4090x8", 8, kRtx4090, kManyCards, card),
      machine("4090", 1, kRtx4090, kOneCard, card),
      machine("3090", 1, kRtx3090, kOneCard, card),
      machine("laptop-8gb", 1, kLaptop, kSmall, card),
  };
}

struct RateKey {
  const char* key;
  double Machine::*value;
};
constexpr RateKey kRateKeys[] = {{"device_bytes", &Machine::device_bytes},
                                 {"flops", &Machine::flops},
                                 {"device_bandwidth", &Machine::device_bandwidth},
                                 {"peer_bandwidth", &Machine::peer_bandwidth},
                                 {"link_bandwidth", &Machine::link_bandwidth},
                                 {"host_bytes", &Machine::host_bytes},
                                 {"host_bandwidth", &Machine::host_bandwidth},
                                 {"drive_bytes", &Machine::drive_bytes},
                                 {"drive_bandwidth", &Machine::drive_bandwidth},
                                 {"network_bandwidth", &Machine::network_bandwidth}};

const Machine* named(std::string_view name) {
  const auto found = std::ranges::find(named_machines(), name, &Machine::name);
  return found == named_machines().end() ? nullptr : &*found;
}

[[noreturn]] void refuse_machine(const std::string& place, const std::string& why) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("{} {}", place, why));
}

int count_of(const nlohmann::json& value, const std::string& place, const std::string& key) {
  if (!value.is_number_integer() || value.get<std::int64_t>() < 1 ||
      value.get<std::int64_t>() > 1'000'000)
    refuse_machine(place, fmt::format("has {} {}, which must be a whole number from 1 to 1000000",
                                      key, value.dump()));
  return value.get<int>();
}

/// What a machine can do without: links to others, and drives.
constexpr std::array<std::string_view, 4> kMayLack{"peer_bandwidth", "network_bandwidth",
                                                   "drive_bytes", "drive_bandwidth"};

/// Below 1 a time is no number that can be compared; above 1e18 it is a slip of the pen.
bool is_rate(const nlohmann::json& value) {
  if (!value.is_number()) return false;
  const auto rate = value.get<double>();
  return rate == 0 || (rate >= 1 && rate <= 1e18);
}

}  // namespace

std::span<const Machine> named_machines() {
  static const std::vector<Machine> all = table_of_machines();
  return all;
}

std::string machine_names() {
  std::string names;
  for (const Machine& one : named_machines()) names += (names.empty() ? "" : ", ") + one.name;
  return names;
}

Machine parse_machine(std::string_view text, const std::string& place) {
  const nlohmann::json object = nlohmann::json::parse(text, nullptr, false);
  if (!object.is_object()) refuse_machine(place, "is not a JSON object");
  Machine made;
  made.name = place;
  made.figures = place;
  if (const auto like = object.find("like"); like != object.end()) {
    const Machine* const base = like->is_string() ? named(like->get<std::string>()) : nullptr;
    if (base == nullptr)
      refuse_machine(
          place, fmt::format("is like {}, which must be one of {}", like->dump(), machine_names()));
    made = *base;
    made.figures = fmt::format("{}, changed in {}", base->figures, place);
  }
  for (const auto& [key, value] : object.items()) {
    if (key == "like") continue;
    const auto* const field = std::ranges::find(kRateKeys, key, &RateKey::key);
    if (key == "name") {
      if (!value.is_string())
        refuse_machine(place, fmt::format("has name {}, which must be a text", value.dump()));
      made.name = value.get<std::string>();
    } else if (key == "gpus" || key == "processors") {
      (key == "gpus" ? made.gpus : made.processors) = count_of(value, place, key);
    } else if (field == std::end(kRateKeys)) {
      refuse_machine(place, fmt::format("has an unknown key '{}'", key));
    } else if (!is_rate(value)) {
      refuse_machine(place,
                     fmt::format("has {} {}, which must be a number of bytes, or of bytes or "
                                 "operations a second: 0 for none, or 1 to 1e18",
                                 key, value.dump()));
    } else {
      made.*(field->value) = value.get<double>();
    }
  }
  for (const RateKey& field : kRateKeys) {
    const bool may_lack =
        std::ranges::find(kMayLack, std::string_view(field.key)) != kMayLack.end();
    if (may_lack) continue;
    if (made.*(field.value) <= 0)
      refuse_machine(place,
                     fmt::format("has no {}, without which nothing can be planned", field.key));
  }
  if (made.gpus > 1 && made.peer_bandwidth <= 0)
    refuse_machine(place, "has several gpus but no peer_bandwidth");
  if (made.drive_bytes > 0 && made.drive_bandwidth <= 0)
    refuse_machine(place, "has drive_bytes but no drive_bandwidth");
  return made;
}

Machine find_machine(const std::string& text) {
  if (const Machine* const known = named(text)) return *known;
  if (text == "this") return this_machine();
  if (!std::filesystem::exists(text)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} is not a known machine; give a JSON file, this, or one of {}", text,
                            machine_names()));
  }
  std::ifstream file(text, std::ios::binary);
  if (!file) throw system_error(errno, fmt::format("{} cannot be opened", text));
  const std::string read{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (file.bad()) throw system_error(EIO, fmt::format("{} cannot be read", text));
  return parse_machine(read, text);
}

}  // namespace ziggurat
