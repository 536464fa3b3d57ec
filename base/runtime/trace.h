// SPDX-License-Identifier: Apache-2.0
// base/runtime/trace.h: what happened when, one track per resource, in the Chrome trace format
// (ui.perfetto.dev opens it).
//
// Thread-safe. A null Trace* means tracing is off; every helper accepts it.
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
  /// Errors: the file cannot be created.
  static std::unique_ptr<Trace> open(const std::string& path);
  ~Trace();

  /// A new track (a row in the viewer), beside those whose name is the same but for a number at its
  /// end, however late it is made. Spans of one track follow each other or nest; work that
  /// overlaps takes a track for each lane, as aio/io_activity.cc does.
  int track(const std::string& name);

  /// Whether all so far is in the file. What cannot be written is said once and ends no run;
  /// nothing more is written then.
  bool flush();

  /// One span. `argument` is shown with it (a chunk, a unit); -1 for none.
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
  std::map<std::string, int> groups_;  ///< names without numbers, in order of appearance
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
