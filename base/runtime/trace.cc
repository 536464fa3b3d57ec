// SPDX-License-Identifier: Apache-2.0
// base/runtime/trace.cc: writes one JSON object per line, so that viewers can open the file of a
// killed run.
#include "base/runtime/trace.h"

#include <cerrno>

#include "base/error.h"
#include "base/log.h"

namespace ziggurat {
namespace {

double microseconds(Nanoseconds t) { return static_cast<double>(t.count()) * 1e-3; }

std::string escaped(const std::string& text) {
  std::string json;
  for (char c : text) {
    if (c == '"' || c == '\\') json += '\\';
    json += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return json;
}

constexpr int kTracksOfGroup = 1000;  // distance between the sort indices of two groups

std::string without_number(const std::string& name) {
  const std::size_t end = name.find_last_not_of("0123456789 ");
  return end == std::string::npos ? name : name.substr(0, end + 1);
}

}  // namespace

std::unique_ptr<Trace> Trace::open(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "we");
  if (file == nullptr) throw system_error(errno, "`trace`: cannot create " + path);
  std::fputs("[\n", file);
  return std::unique_ptr<Trace>(new Trace(file, path));
}

Trace::~Trace() {
  const bool before = whole();
  bool written = before && std::fputs("\n]\n", file_) >= 0;
  int error = errno;
  if (std::fclose(file_) != 0) {
    written = false;
    error = errno;
  }
  if (before && !written) say_lost(error);
}

/// Logs that the trace is incomplete. Called right after the first call that failed, because a
/// later call changes errno.
void Trace::say_lost(int error_number) const {
  log().error(
      "cannot write the trace {}: {}; the trace is incomplete, and no more is written to it", path_,
      errno_text(error_number));
}

bool Trace::flush() {
  const std::lock_guard lock(mutex_);
  if (!whole()) return false;
  if (std::fflush(file_) == 0) return true;
  say_lost(errno);
  return false;
}

int Trace::track(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const int id = next_track_++;
  const int groups = static_cast<int>(groups_.size());
  const int group = groups_.try_emplace(without_number(name), groups).first->second;
  if (!whole()) return id;
  std::fprintf(
      file_,
      "%s{\"ph\":\"M\",\"pid\":1,\"tid\":%d,\"name\":\"thread_name\",\"args\":{\"name\":\"%s\"}}",
      first_ ? "" : ",\n", id, escaped(name).c_str());
  std::fprintf(file_,
               ",\n{\"ph\":\"M\",\"pid\":1,\"tid\":%d,\"name\":\"thread_sort_index\",\"args\":{"
               "\"sort_index\":%d}}",
               id, group * kTracksOfGroup + id);
  if (!whole()) say_lost(errno);
  first_ = false;
  return id;
}

void Trace::span(int track, const char* name, Nanoseconds begin, Nanoseconds end,
                 std::int64_t argument) {
  const std::lock_guard lock(mutex_);
  if (!whole()) return;
  std::fprintf(
      file_, "%s{\"ph\":\"X\",\"pid\":1,\"tid\":%d,\"name\":\"%s\",\"ts\":%.3f,\"dur\":%.3f",
      first_ ? "" : ",\n", track, name, microseconds(begin - origin_), microseconds(end - begin));
  if (argument >= 0)
    std::fprintf(file_, ",\"args\":{\"id\":%lld}", static_cast<long long>(argument));
  std::fputs("}", file_);
  if (!whole()) say_lost(errno);
  first_ = false;
}

}  // namespace ziggurat
