// SPDX-License-Identifier: Apache-2.0
// integrations/measure/target.cc: opens what may be measured, and refuses what may not.
#include "integrations/measure/target.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <random>

#include "aio/posix_files.h"
#include "aio/probe.h"
#include "base/bytes.h"
#include "base/error.h"

namespace ziggurat::measure {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, what);
}

struct stat look_up(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) throw system_error(errno, "cannot look at " + path);
  return status;
}

void require_space(const DriveFacts& drive, const std::string& path, std::uint64_t size_bytes) {
  if (size_bytes <= drive.free_bytes) return;
  throw Error(ErrorCode::kResourceExhausted,
              fmt::format("`size={}` does not fit into {}, where only {} are free; give a smaller "
                          "`size` or another `path`",
                          format_bytes(size_bytes), path, format_bytes(drive.free_bytes)));
}

}  // namespace

void Target::attach(Reactor& reactor, const std::string& folder, const std::string& path,
                    const OpenOptions& options) {
  label_ = path;
  drive_ = drive_facts(path);
  engine_ = choose_io_engine(reactor, folder);
  file_ = DirectFile::open(reactor, *engine_, path, options);
}

std::unique_ptr<Target> Target::create(Reactor& reactor, const std::string& path,
                                       std::uint64_t size_bytes) {
  const struct stat status = look_up(path);
  if (S_ISBLK(status.st_mode)) {
    refuse(fmt::format(
        "`path={}` is a raw device, to which the benchmark never writes; give a folder of a "
        "filesystem on it, or read the device with `file={}` and `allow_raw_device`",
        path, path));
  }
  if (!S_ISDIR(status.st_mode)) {
    refuse(
        fmt::format("`path={}` is not a folder, but the benchmark needs one for a file of its own; "
                    "to read this very file, give `file={}`",
                    path, path));
  }
  require_space(drive_facts(path), path, size_bytes);
  std::unique_ptr<Target> target(new Target());
  target->ours_ = true;
  target->attach(reactor, path, path, {.writable = true, .unnamed = true});
  target->size_bytes_ = size_bytes;
  target->file_->allocate(size_bytes);
  std::random_device device;
  target->pass.file_seed = (static_cast<std::uint64_t>(device()) << 32) | device();
  return target;
}

std::unique_ptr<Target> Target::open(Reactor& reactor, const std::string& path,
                                     std::uint64_t size_bytes, bool allow_raw_device) {
  const struct stat status = look_up(path);
  const bool raw = S_ISBLK(status.st_mode);
  if (raw && !allow_raw_device) {
    refuse(
        fmt::format("`file={}` is a raw device; give `allow_raw_device` to read it (the benchmark "
                    "never writes to it)",
                    path));
  }
  if (!raw && !S_ISREG(status.st_mode))
    refuse(fmt::format("`file={}` is neither a regular file nor a block device", path));
  std::unique_ptr<Target> target(new Target());
  // The probe writes 4 KiB to an unnamed file: in the folder of the measured file if that is
  // allowed, otherwise in the current folder.
  const std::string folder = std::filesystem::absolute(path).parent_path().string();
  target->attach(reactor, ::access(folder.c_str(), W_OK) == 0 && !raw ? folder : ".", path, {});
  const std::uint64_t whole = size_of(target->descriptor(), path);
  target->size_bytes_ = size_bytes == 0 ? whole : std::min(whole, size_bytes);
  if (raw) target->drive_.size_bytes = whole;
  target->content = Content::kForeign;
  return target;
}

int Target::descriptor() const {
  return dynamic_cast<const PosixFiles&>(*engine_).native_descriptor(file_->handle());
}

std::string Target::path_for_others() const {
  if (!ours_) return std::filesystem::absolute(label_).string();
  return fmt::format("/proc/{}/fd/{}", ::getpid(), descriptor());
}

}  // namespace ziggurat::measure
