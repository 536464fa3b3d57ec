// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/text.cc: reads and splits the text, and draws batches from it.
#include "integrations/gpt/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <span>

#include "base/bytes.h"
#include "base/checksum.h"
#include "base/error.h"
#include "integrations/gpt/random.h"

namespace ziggurat::gpt {
namespace {

namespace fs = std::filesystem;

Error bad_data(const std::string& path, const std::string& why) {
  return Error(ErrorCode::kInvalidArgument, fmt::format("data {}: {}", path, why));
}

void append_file(const fs::path& path, std::vector<std::uint8_t>& bytes) {
  std::error_code error;
  const std::uintmax_t size = fs::file_size(path, error);
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  if (error || !in)
    throw bad_data(path.string(),
                   "the file cannot be read: " + errno_text(error ? error.value() : errno));
  const std::size_t before = bytes.size();
  bytes.resize(before + size);
  in.read(reinterpret_cast<char*>(bytes.data() + before), static_cast<std::streamsize>(size));
  if (static_cast<std::uintmax_t>(in.gcount()) != size) {
    throw bad_data(
        path.string(),
        fmt::format("only {} of {} bytes could be read: the file changed, or the disk failed",
                    in.gcount(), size));
  }
}

std::vector<fs::path> files_below(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::recursive_directory_iterator at(folder, error), end; !error && at != end;
       at.increment(error)) {
    if (at->is_regular_file()) files.push_back(at->path());
  }
  if (error) throw bad_data(folder.string(), "the folder cannot be read: " + error.message());
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

Text Text::load(const std::string& path, std::int64_t context) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) throw bad_data(path, "there is no such file or folder");
  std::vector<std::uint8_t> bytes;
  if (fs::is_directory(status)) {
    for (const fs::path& file : files_below(path)) append_file(file, bytes);
  } else if (fs::is_regular_file(status)) {
    append_file(path, bytes);
  } else {
    throw bad_data(path, "the path is neither a regular file nor a folder");
  }
  return from_bytes(std::move(bytes), path, context);
}

Text Text::from_bytes(std::vector<std::uint8_t> bytes, const std::string& name,
                      std::int64_t context) {
  if (context < 1)
    throw Error(ErrorCode::kInvalidArgument, fmt::format("context {} must be at least 1", context));
  if (bytes.empty()) throw bad_data(name, "the data has no text (0 bytes)");
  const auto sequence = static_cast<std::uint64_t>(context) + 1;  // a target follows each input
  if (bytes.size() < 2 * sequence) {
    throw bad_data(name, fmt::format("a text of {} is too short for context {}: a sequence to "
                                     "train on and one held out need {} bytes",
                                     format_bytes(bytes.size()), context, 2 * sequence));
  }
  Text text;
  text.context_ = context;
  text.training_bytes_ = bytes.size() - std::max<std::uint64_t>(sequence, bytes.size() / 20);
  text.bytes_ = std::move(bytes);
  return text;
}

std::uint64_t Text::hash() const noexcept { return hash64(std::as_bytes(std::span(bytes_)), 0); }

std::uint64_t Text::held_out_count() const noexcept {
  return (bytes_.size() - training_bytes_ - 1) / static_cast<std::uint64_t>(context_);
}

void Text::append(Batch& batch, std::uint64_t start) const {
  const auto first = bytes_.begin() + static_cast<std::ptrdiff_t>(start);
  batch.inputs.insert(batch.inputs.end(), first, first + context_);
  batch.targets.insert(batch.targets.end(), first + 1, first + 1 + context_);
}

Batch Text::training_batch(const Position& position, std::int64_t batch) const {
  const std::uint64_t starts = training_bytes_ - static_cast<std::uint64_t>(context_);
  Batch result;
  for (std::int64_t row = 0; row < batch; ++row) {
    std::uint64_t key = mix64(position.seed);
    key = mix64(key ^ position.step);
    key = mix64(key ^ position.micro);
    key = mix64(key ^ static_cast<std::uint64_t>(row));
    append(result, key % starts);
  }
  return result;
}

Batch Text::held_out_batch(std::uint64_t index, std::int64_t batch) const {
  Batch result;
  for (std::int64_t row = 0; row < batch; ++row) {
    const std::uint64_t sequence =
        (index * static_cast<std::uint64_t>(batch) + static_cast<std::uint64_t>(row)) %
        held_out_count();
    append(result, training_bytes_ + sequence * static_cast<std::uint64_t>(context_));
  }
  return result;
}

}  // namespace ziggurat::gpt
