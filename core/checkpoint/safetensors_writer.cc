// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/safetensors_writer.cc: writes the header and the tensors, and publishes the file
// by renaming it.
#include "core/checkpoint/safetensors_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/numerics/float16.h"
#include "core/checkpoint/safetensors_header.h"

namespace ziggurat {
namespace {

static_assert(std::endian::native == std::endian::little,
              "tensors are written as they lie in memory");

constexpr std::size_t kBufferBytes = 1 << 20;

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

void sync_folder(const std::string& path) {
  const std::string folder = folder_of(path);
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0)
    throw system_error(errno, fmt::format("cannot open the folder {} to sync it", folder));
  const int result = ::fsync(fd);
  const int error = errno;
  ::close(fd);
  // Some filesystems cannot sync folders (EINVAL), and nothing can be done about it.
  if (result != 0 && error != EINVAL)
    throw system_error(error, fmt::format("cannot sync the folder {}", folder));
}

std::string json_text(const nlohmann::json& value) {
  try {
    return value.dump();
  } catch (const nlohmann::json::exception&) {
    throw Error(ErrorCode::kInvalidArgument,
                "safetensors: a name or a metadata text is not UTF-8: write it in UTF-8");
  }
}

Error exists_error(const std::string& path) {
  return {
      ErrorCode::kInvalidArgument,
      fmt::format("{} is there already: give another name, or give `force` to replace it", path),
      EEXIST};
}

}  // namespace

std::uint64_t SafetensorsTensor::count() const noexcept {
  std::uint64_t total = 1;
  for (const std::int64_t dimension : shape) total *= static_cast<std::uint64_t>(dimension);
  return total;
}

std::string safetensors_header(std::span<const SafetensorsTensor> tensors,
                               const std::map<std::string, std::string>& metadata) {
  // The JSON is written by hand, in the order of the offsets, because a JSON object that keeps its
  // order looks each key up from the front.
  std::string json = "{";
  if (!metadata.empty()) json += fmt::format("\"__metadata__\":{}", json_text(metadata));
  std::set<std::string_view> names;
  std::uint64_t offset = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    if (tensor.name.empty() || tensor.name == "__metadata__" || !names.insert(tensor.name).second) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("safetensors: '{}' cannot name a tensor, because names must not be "
                              "empty, __metadata__ or repeated",
                              tensor.name));
    }
    if (std::any_of(tensor.shape.begin(), tensor.shape.end(),
                    [](std::int64_t d) { return d < 0; })) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("safetensors: tensor '{}' has a negative dimension", tensor.name));
    }
    const std::uint64_t end = offset + tensor.size_bytes();
    json += fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                        json.size() > 1 ? "," : "", json_text(tensor.name), to_string(tensor.type),
                        fmt::join(tensor.shape, ","), offset, end);
    offset = end;
  }
  json += "}";
  json.resize((json.size() + 7) / 8 * 8, ' ');
  if (json.size() > kSafetensorsHeaderBytesMax) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("safetensors: the header has {} bytes, but readers accept at most {}",
                            json.size(), kSafetensorsHeaderBytesMax));
  }
  const std::uint64_t length = json.size();
  std::string text(sizeof(length), '\0');
  std::memcpy(text.data(), &length, sizeof(length));
  return text + json;
}

SafetensorsWriter::SafetensorsWriter(std::string path, std::vector<SafetensorsTensor> tensors,
                                     Options options)
    : path_(std::move(path)), tensors_(std::move(tensors)), overwrite_(options.overwrite) {
  const std::string header = safetensors_header(tensors_, options.metadata);
  file_bytes_ = header.size();
  for (const SafetensorsTensor& tensor : tensors_) file_bytes_ += tensor.size_bytes();

  struct stat status {};
  if (::lstat(path_.c_str(), &status) == 0) {
    if (!S_ISREG(status.st_mode)) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} exists and is not a regular file: give another name", path_),
                  EEXIST);
    }
    if (!overwrite_) throw exists_error(path_);
  }
  temporary_path_ = path_ + ".part-XXXXXX";
  fd_ = ::mkostemp(temporary_path_.data(), O_CLOEXEC);
  if (fd_ < 0) throw system_error(errno, fmt::format("cannot create a file beside {}", path_));
  try {
    // Reserving space first turns a disk that is too small into an error now, not after minutes.
    const int error = ::posix_fallocate(fd_, 0, static_cast<off_t>(file_bytes_));
    if (error != 0 && error != EOPNOTSUPP && error != EINVAL) {
      throw system_error(error, fmt::format("cannot reserve {} bytes for {}", file_bytes_, path_));
    }
    write(std::as_bytes(std::span(header)));
  } catch (...) {
    ::close(fd_);
    ::unlink(temporary_path_.c_str());
    throw;
  }
}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_path_.c_str());
}

void SafetensorsWriter::pass_whole_tensors() noexcept {
  while (tensor_ < tensors_.size() && element_ == tensors_[tensor_].count()) {
    ++tensor_;
    element_ = 0;
  }
}

void SafetensorsWriter::append_bits(std::span<const std::byte> bytes) {
  pass_whole_tensors();
  const bool last = tensor_ == tensors_.size();
  const std::uint64_t left = last ? 0
                                  : tensors_[tensor_].size_bytes() -
                                        element_ * ziggurat::size_bytes(tensors_[tensor_].type);
  if (bytes.size() > left) {
    const std::string after =
        last ? "the last tensor"
             : fmt::format("'{}', which has room for {}", tensors_[tensor_].name, left);
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: {} bytes were given {} {}", path_, bytes.size(),
                            last ? "after" : "for", after));
  }
  if (bytes.empty()) return;
  const std::size_t size = ziggurat::size_bytes(tensors_[tensor_].type);
  if (bytes.size() % size != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: {} bytes are not a whole number of values of '{}'", path_,
                            bytes.size(), tensors_[tensor_].name));
  }
  write(bytes);
  element_ += bytes.size() / size;
}

void SafetensorsWriter::append(std::span<const float> values) {
  while (!values.empty()) {
    pass_whole_tensors();
    if (tensor_ == tensors_.size()) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: {} values were given after the last value of the last tensor",
                              path_, values.size()));
    }
    const SafetensorsTensor& tensor = tensors_[tensor_];
    const std::uint64_t room = std::min<std::uint64_t>(tensor.count() - element_, kBufferBytes / 4);
    const std::span<const float> part = values.first(std::min<std::uint64_t>(room, values.size()));
    switch (tensor.type) {
      case TensorType::kF32: write(std::as_bytes(part)); break;
      case TensorType::kBF16: write(rounded(part, float_to_bf16)); break;
      case TensorType::kF16: write(rounded(part, float_to_fp16)); break;
      case TensorType::kU8:
        throw Error(ErrorCode::kInvalidArgument,
                    fmt::format("{}: '{}' holds codes, to which values cannot be rounded: append "
                                "its bytes with append_bits()",
                                path_, tensor.name));
    }
    element_ += part.size();
    values = values.subspan(part.size());
  }
}

std::span<const std::byte> SafetensorsWriter::rounded(std::span<const float> values,
                                                      std::uint16_t (*round)(float)) {
  buffer_.resize(values.size() * sizeof(std::uint16_t));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint16_t bits = round(values[i]);
    std::memcpy(&buffer_[i * sizeof(bits)], &bits, sizeof(bits));
  }
  return buffer_;
}

void SafetensorsWriter::finish() {
  pass_whole_tensors();
  if (tensor_ != tensors_.size()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: '{}' has only {} of its {} values: append the others before finish()",
                    path_, tensors_[tensor_].name, element_, tensors_[tensor_].count()));
  }
  // mkostemp() makes files of mode 0600. This file is the user's to share, so the umask decides.
  const mode_t mask = ::umask(0);
  ::umask(mask);
  if (::fchmod(fd_, 0666 & ~mask) != 0)
    throw system_error(errno, fmt::format("cannot set the mode of {}", path_));
  if (::fsync(fd_) != 0) throw system_error(errno, fmt::format("cannot sync {}", temporary_path_));
  const unsigned flags = overwrite_ ? 0 : RENAME_NOREPLACE;
  int result = ::renameat2(AT_FDCWD, temporary_path_.c_str(), AT_FDCWD, path_.c_str(), flags);
  if (result != 0 && errno == EINVAL && !overwrite_) {
    // The filesystem has no RENAME_NOREPLACE (NFS, some FUSE): a hard link refuses an existing name
    // just as well.
    result = ::link(temporary_path_.c_str(), path_.c_str());
    if (result == 0) ::unlink(temporary_path_.c_str());
  }
  if (result != 0) {
    const int error = errno;
    if (error == EEXIST) throw exists_error(path_);
    throw system_error(error, fmt::format("cannot rename {} to {}", temporary_path_, path_));
  }
  const int fd = std::exchange(fd_, -1);
  if (::close(fd) != 0) throw system_error(errno, fmt::format("cannot close {}", path_));
  sync_folder(path_);
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t result = ::write(fd_, bytes.data(), bytes.size());
    if (result < 0) {
      if (errno == EINTR) continue;
      throw system_error(
          errno, fmt::format("cannot write {} at offset {}", temporary_path_, written_bytes_));
    }
    written_bytes_ += static_cast<std::uint64_t>(result);
    bytes = bytes.subspan(static_cast<std::size_t>(result));
  }
}

}  // namespace ziggurat
