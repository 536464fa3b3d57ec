// SPDX-License-Identifier: Apache-2.0
// base/runtime/trace.h: records what happened when, one track per resource, in the Chrome trace
// format (ui.perfetto.dev opens it).
//
// Thread-safe. A null Trace* means that tracing is off; every helper accepts it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "base/runtime/clock.h"

namespace ziggurat {

class Trace {
 public:
  /// Creates the file. Errors: system_error's if that fails.
  static std::unique_ptr<Trace> open(const std::string& path);
  ~Trace();

  /// Makes a new track (a row in the viewer). The viewer shows it beside tracks whose names differ
  /// only by a number at the end, no matter when it is made. Spans of one track follow each other
  /// or nest; work that overlaps needs a track for each lane, as in aio/io_activity.cc.
  int track(const std::string& name);

  /// Writes the buffered spans to the file. Returns whether everything so far is in it. The first
  /// failure is logged; then nothing more is written, and the run goes on.
  bool flush();

  /// Records one span. The viewer shows `argument` with it (a chunk, a unit); -1 for none.
  void span(int track, const char* name, Nanoseconds begin, Nanoseconds end,
            std::int64_t argument = -1);

 private:
  Trace(std::FILE* file, std::string path) : file_(file), path_(std::move(path)) {}
  bool whole() const { return std::ferror(file_) == 0; }
  void say_lost(int error_number) const;

  std::mutex mutex_;
  std::FILE* file_;
  std::string path_;
  Nanoseconds origin_ = monotonic_now();
  int next_track_ = 1;
  std::map<std::string, int> groups_;  ///< names without numbers, and their order of appearance
  bool first_ = true;
};

/// Records [construction, destruction) on `track` if `trace` is on.
class TraceSpan {
 public:
  TraceSpan(Trace* trace, int track, const char* name, std::int64_t argument = -1)
      : trace_(trace), track_(track), name_(name), argument_(argument) {
    if (trace_ != nullptr) begin_ = monotonic_now();
  }
  ~TraceSpan() {
    if (trace_ != nullptr) trace_->span(track_, name_, begin_, monotonic_now(), argument_);
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  Trace* trace_;
  int track_;
  const char* name_;
  std::int64_t argument_;
  Nanoseconds begin_{0};
};

}  // namespace ziggurat
