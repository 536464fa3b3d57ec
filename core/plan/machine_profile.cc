// SPDX-License-Identifier: Apache-2.0
// core/plan/machine_profile.cc: reads and writes the profile. Each object has one list of keys,
// which serves both.
#include "core/plan/machine_profile.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"

namespace ziggurat {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::size_t kFileBytesMax = 1 << 20;
constexpr int kDepthMax = 6;
constexpr std::size_t kDrivesMax = 256;
constexpr double kRateMax = 1e6;  // GB/s or GFLOP/s: beyond any machine

[[noreturn]] void refuse(const std::string& name, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: {}", name, what));
}

/// Reads members by name, and refuses an object that has members nobody read.
class ObjectReader {
 public:
  ObjectReader(const json& object, std::string name, std::string where)
      : object_(object), name_(std::move(name)), where_(std::move(where)) {
    if (!object_.is_object()) refuse(name_, where_ + " must be an object");
  }

  void operator()(const char* key, std::string& value) {
    value = take(key, "a string").get_ref<const std::string&>();
  }
  void operator()(const char* key, bool& value) { value = take(key, "true or false").get<bool>(); }
  void operator()(const char* key, double& value) {
    value = take(key, "a number").get<double>();
    if (!(value >= 0) || value > kRateMax)
      refuse(name_, fmt::format("{}\"{}\" is {}; it must be from 0 to {}", prefix(), key, value,
                                kRateMax));
  }
  void operator()(const char* key, std::uint64_t& value) {
    value = take(key, "a whole number, not negative").get<std::uint64_t>();
  }
  void operator()(const char* key, std::vector<std::string>& value) {
    for (const json& element : take(key, "a list of strings")) {
      if (!element.is_string())
        refuse(name_, fmt::format("{}\"{}\" must be a list of strings", prefix(), key));
      value.push_back(element.get<std::string>());
    }
  }
  /// Reads a number that files of older programs do not have.
  void if_there(const char* key, double& value) {
    if (find(key) != nullptr) (*this)(key, value);
  }
  const json* find(const char* key) {
    known_.insert(key);
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }
  /// Throws if the object has a key that was not read.
  void finish() const {
    for (const auto& [key, unused] : object_.items()) {
      if (known_.count(key) == 0)
        refuse(name_, fmt::format("unknown key {}\"{}\"; the keys are {}", prefix(), key,
                                  fmt::join(known_, ", ")));
    }
  }

 private:
  std::string prefix() const { return where_.empty() ? "" : where_ + " "; }
  static bool fits(const json& value, std::string_view what) {
    if (what == "a string") return value.is_string();
    if (what == "true or false") return value.is_boolean();
    if (what == "a number") return value.is_number();
    if (what == "a list of strings") return value.is_array();
    return value.is_number_unsigned();
  }
  const json& take(const char* key, std::string_view what) {
    const json* const value = find(key);
    if (value == nullptr) refuse(name_, fmt::format("{}\"{}\" is missing", prefix(), key));
    if (!fits(*value, what))
      refuse(name_, fmt::format("{}\"{}\" is {}; it must be {}", prefix(), key,
                                value->dump().substr(0, 60), what));
    return *value;
  }

  const json& object_;
  std::string name_;
  std::string where_;
  std::set<std::string> known_;
};

struct ObjectWriter {
  ordered_json& object;
  template <class T>
  void operator()(const char* key, const T& value) {
    object[key] = value;
  }
  void if_there(const char* key, double value) { (*this)(key, value); }
};

template <class Drive, class Visit>
void visit_drive(Drive& drive, Visit&& visit) {
  visit("path", drive.path);
  visit("device", drive.device);
  visit("filesystem", drive.filesystem);
  visit("engine", drive.engine);
  visit("measured_at", drive.measured_at);
  visit("read_gb_per_s", drive.read_gb_per_s);
  visit("write_gb_per_s", drive.write_gb_per_s);
  visit("mix_gb_per_s", drive.mix_gb_per_s);
  visit("sweep_gb_per_s", drive.sweep_gb_per_s);
  visit("block_bytes", drive.block_bytes);
  visit("queue_depth", drive.queue_depth);
  visit("flags", drive.flags);
}

template <class Aio, class Visit>
void visit_aio(Aio& aio, Visit&& visit) {
  visit("block_size", aio.block_size);
  visit("queue_depth", aio.queue_depth);
  visit("intra_op_parallelism", aio.intra_op_parallelism);
  visit("single_submit", aio.single_submit);
  visit("overlap_events", aio.overlap_events);
  visit("use_gds", aio.use_gds);
}

template <class Compute, class Visit>
void visit_compute(Compute& compute, Visit&& visit) {
  visit("measured_at", compute.measured_at);
  visit("threads", compute.threads);
  visit("layer_gflop_per_s", compute.layer_gflop_per_s);
  visit.if_there("layer_fp32_gflop_per_s", compute.layer_fp32_gflop_per_s);
  visit("unaligned_gflop_per_s", compute.unaligned_gflop_per_s);
  visit("attention_gflop_per_s", compute.attention_gflop_per_s);
  visit("pass_gb_per_s", compute.pass_gb_per_s);
  visit("copy_gb_per_s", compute.copy_gb_per_s);
  visit.if_there("weights_gb_per_s", compute.weights_gb_per_s);
  visit.if_there("kernels_gb_per_s", compute.kernels_gb_per_s);
}

template <class Profile, class Visit>
void visit_machine(Profile& profile, Visit&& visit) {
  visit("cpu_model", profile.cpu_model);
  visit("kernel", profile.kernel);
  visit("host_adam_gb_per_s", profile.host_adam_gb_per_s);
}

/// Parses JSON and refuses an object with the same key twice, because two readers could then see
/// different values.
json parse_strictly(std::string_view text, const std::string& name) {
  std::vector<std::set<std::string>> seen;
  const auto callback = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > kDepthMax)
      refuse(name, fmt::format("the profile is nested deeper than {} levels", kDepthMax));
    if (event == json::parse_event_t::object_start) {
      seen.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      seen.pop_back();
    } else if (event == json::parse_event_t::key &&
               !seen.back().insert(parsed.get<std::string>()).second) {
      refuse(name, fmt::format("the key \"{}\" appears twice in the same object",
                               parsed.get<std::string>()));
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), callback);
  } catch (const json::parse_error& error) {
    refuse(name, fmt::format("the profile is not JSON: byte {} is wrong", error.byte));
  }
}

void require_version(const json* version, const std::string& name) {
  if (version == nullptr || !version->is_number_integer())
    refuse(name, "\"ziggurat_profile\" (the version) is missing, so this is not a machine profile");
  if (*version == MachineProfile::kVersion) return;
  refuse(name, fmt::format("the profile has version {}, but this program reads version {}",
                           version->dump(), MachineProfile::kVersion));
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  int get() const noexcept { return fd_; }

 private:
  int fd_;
};

void write_whole(int fd, std::string_view text, const std::string& path) {
  while (!text.empty()) {
    const ssize_t count = ::write(fd, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw system_error(errno, "cannot write " + path);
    text.remove_prefix(static_cast<std::size_t>(count));
  }
  if (::fsync(fd) != 0) throw system_error(errno, "cannot flush " + path);
}

std::optional<std::string> profile_path_at_home() {
  const char* const config = std::getenv("XDG_CONFIG_HOME");
  if (config != nullptr && *config == '/') return std::string(config) + "/ziggurat/profile.json";
  const char* const home = std::getenv("HOME");
  if (home != nullptr && *home != '\0') return std::string(home) + "/.config/ziggurat/profile.json";
  return std::nullopt;
}

void make_folders(const std::filesystem::path& folder) {
  if (folder.empty() || std::filesystem::is_directory(folder)) return;
  make_folders(folder.parent_path());
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
    throw system_error(errno, "cannot make the folder " + folder.string());
}

}  // namespace

void MachineProfile::set_drive(DriveProfile drive) {
  const auto same = std::find_if(drives.begin(), drives.end(),
                                 [&](const DriveProfile& each) { return each.path == drive.path; });
  if (same == drives.end()) {
    drives.push_back(std::move(drive));
  } else {
    *same = std::move(drive);
  }
}

const DriveProfile* MachineProfile::find(std::string_view path) const noexcept {
  const auto found = std::find_if(drives.begin(), drives.end(),
                                  [&](const DriveProfile& each) { return each.path == path; });
  return found == drives.end() ? nullptr : &*found;
}

const DriveProfile* MachineProfile::under(const std::string& path) const {
  namespace fs = std::filesystem;
  const std::string whole = fs::absolute(path).lexically_normal().string() + "/";
  const DriveProfile* nearest = nullptr;
  for (const DriveProfile& drive : drives) {
    const std::string above = fs::path(drive.path).lexically_normal().string();
    const bool is_above = whole.starts_with(above.ends_with('/') ? above : above + "/");
    if (is_above && (nearest == nullptr || drive.path.size() > nearest->path.size()))
      nearest = &drive;
  }
  return nearest;
}

MachineProfile parse_profile(std::string_view text, const std::string& name) {
  const json parsed = parse_strictly(text, name);
  MachineProfile profile;
  ObjectReader whole(parsed, name, "");
  require_version(whole.find("ziggurat_profile"), name);
  const json* const machine = whole.find("machine");
  if (machine == nullptr) refuse(name, "\"machine\" is missing");
  ObjectReader machine_reader(*machine, name, "machine");
  visit_machine(profile, machine_reader);
  machine_reader.finish();
  const json* const drives = whole.find("drives");
  if (drives == nullptr || !drives->is_array()) refuse(name, "\"drives\" must be a list");
  if (drives->size() > kDrivesMax)
    refuse(name, fmt::format("the profile lists more than {} drives", kDrivesMax));
  for (std::size_t i = 0; i < drives->size(); ++i) {
    ObjectReader reader((*drives)[i], name, fmt::format("drives[{}]", i));
    visit_drive(profile.drives.emplace_back(), reader);
    reader.finish();
  }
  if (const json* const compute = whole.find("compute")) {
    ObjectReader reader(*compute, name, "compute");
    visit_compute(profile.compute.emplace(), reader);
    reader.finish();
  }
  if (const json* const aio = whole.find("aio")) {
    ObjectReader reader(*aio, name, "aio");
    visit_aio(profile.aio.emplace(), reader);
    reader.finish();
  }
  whole.finish();
  return profile;
}

std::optional<MachineProfile> read_profile(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) {
    if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
    throw system_error(errno, "cannot open the machine profile " + path);
  }
  std::string text(kFileBytesMax + 1, '\0');
  std::size_t size = 0;
  for (;;) {
    const ssize_t count = ::read(file.get(), text.data() + size, text.size() - size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw system_error(errno, "cannot read the machine profile " + path);
    if (count == 0) break;
    size += static_cast<std::size_t>(count);
    if (size > kFileBytesMax)
      refuse(path, fmt::format("the profile is longer than {} bytes", kFileBytesMax));
  }
  text.resize(size);
  try {
    return parse_profile(text, path);
  } catch (const Error& error) {  // which measuring would keep, as it may be another program's file
    throw Error(error.code(),
                fmt::format("{}; remove the file, or move it away, and measure the machine "
                            "again: `ziggurat profile` says how",
                            error.what()));
  }
}

std::optional<MachineProfile> read_default_profile() {
  const std::optional<std::string> path = profile_path_at_home();
  return path ? read_profile(*path) : std::nullopt;
}

std::string to_json_text(const MachineProfile& profile) {
  ordered_json whole;
  whole["ziggurat_profile"] = MachineProfile::kVersion;
  ordered_json machine = ordered_json::object();
  visit_machine(profile, ObjectWriter{machine});
  whole["machine"] = std::move(machine);
  whole["drives"] = ordered_json::array();
  for (const DriveProfile& drive : profile.drives) {
    ordered_json object = ordered_json::object();
    visit_drive(drive, ObjectWriter{object});
    whole["drives"].push_back(std::move(object));
  }
  if (profile.compute) {
    ordered_json object = ordered_json::object();
    visit_compute(*profile.compute, ObjectWriter{object});
    whole["compute"] = std::move(object);
  }
  if (profile.aio) {
    ordered_json object = ordered_json::object();
    visit_aio(*profile.aio, ObjectWriter{object});
    whole["aio"] = std::move(object);
  }
  return whole.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

void write_profile(const MachineProfile& profile, const std::string& path) {
  make_folders(std::filesystem::path(path).parent_path());
  std::string temporary = path + ".XXXXXX";
  const Descriptor file(::mkostemp(temporary.data(), O_CLOEXEC));  // exclusive, mode 0600
  if (file.get() < 0) throw system_error(errno, "cannot make a temporary file beside " + path);
  try {
    write_whole(file.get(), to_json_text(profile), temporary);
    if (::rename(temporary.c_str(), path.c_str()) != 0)
      throw system_error(errno, fmt::format("cannot rename {} to {}", temporary, path));
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

std::string default_profile_path() {
  if (const std::optional<std::string> path = profile_path_at_home()) return *path;
  throw Error(ErrorCode::kInvalidArgument,
              "neither XDG_CONFIG_HOME nor HOME is set, so the machine profile has no default "
              "path: set `profile` to its path");
}

}  // namespace ziggurat
