// SPDX-License-Identifier: Apache-2.0
// integrations/measure/measurement.h: the figures of one run of one workload, and the recorder that
// collects them. GB is 1e9 bytes everywhere.
//
// CPU is counted in the same way for every row: all processor time of this process (user and
// system, every thread) between the first request and the last completion, minus what is measured
// separately. That is stamping what is written (fill), and the optimizer's jobs (compute). The rest
// is the cost of the transfers. Everything must be called on the reactor's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "aio/io_engine.h"
#include "base/runtime/clock.h"
#include "integrations/measure/latency.h"
#include "integrations/measure/verdict.h"

namespace ziggurat::measure {

/// Shows what the benchmark does. Both functions may be called from any thread.
struct Progress {
  std::function<void(const std::string&)> line;  ///< stays
  std::function<void(const std::string&)> live;  ///< is replaced by the next text
};

/// What a drive is asked to do.
enum class IoMix : std::uint8_t { kRead, kWrite, kMix };
inline constexpr std::size_t kIoMixes = 3;

double in_seconds(Nanoseconds time) noexcept;
double seconds_since(Nanoseconds start) noexcept;

/// Returns the processor time of all threads of this process; thread_cpu() returns that of the
/// calling thread.
Nanoseconds process_cpu() noexcept;
Nanoseconds thread_cpu() noexcept;

/// Counts of the units that had to be read by a deadline.
struct Deadlines {
  std::uint64_t units = 0;  ///< the units that had a deadline
  std::uint64_t missed = 0;
  double worst_late_s = 0;
  double stalled_s = 0;  ///< the time that the consumer waited in all
  double pace_gb_per_s = 0;
  std::uint64_t unit_bytes = 0;
};

struct Measurement {
  double seconds = 0;
  std::uint64_t read_bytes = 0;
  std::uint64_t write_bytes = 0;
  double io_cpu_s = 0;
  double fill_cpu_s = 0;
  double compute_cpu_s = 0;
  double flush_s = 0;  ///< time of the fdatasync after the last write; not in `seconds`
  std::vector<double> gb_per_tenth;  ///< GB moved in each tenth of a second
  Latencies latency;
  SampleFacts sample;
  std::optional<Deadlines> deadlines;
  std::optional<double> adam_gb_per_s;  ///< speed of the optimizer that ran beside, if one did
  std::vector<Flag> flags;

  double gb() const noexcept { return static_cast<double>(read_bytes + write_bytes) / 1e9; }
  double gb_per_s() const noexcept { return seconds > 0 ? gb() / seconds : 0; }
  double cpu_s_per_gb() const noexcept { return gb() > 0 ? io_cpu_s / gb() : 0; }
  /// Returns the GB/s of each whole second; empty for a run of less than one second.
  std::vector<double> per_second() const;
};

class AdamLoad;

class Recorder {
 public:
  /// `beside` is the load that runs at the same time, whose CPU is counted separately; null if
  /// there is none.
  Recorder(std::string name, double seconds, const Progress& progress,
           const AdamLoad* beside = nullptr);

  /// Starts the clocks.
  void begin();
  /// Returns whether another request may start.
  bool running() const noexcept { return monotonic_now() < deadline_; }
  Nanoseconds deadline() const noexcept { return deadline_; }
  Nanoseconds begun() const noexcept { return begin_; }
  /// Counts a transfer that started at `started` and is done now.
  void add(IoKind kind, std::uint64_t size_bytes, Nanoseconds started);
  void add_fill_cpu(Nanoseconds time) noexcept { fill_cpu_ += time; }
  /// Stops the clocks and returns the figures. `compute_cpu` was spent in jobs that do not belong
  /// to the transfers.
  Measurement finish(Nanoseconds compute_cpu = Nanoseconds(0));

 private:
  std::string name_;
  double seconds_;
  const Progress& progress_;
  const AdamLoad* beside_;
  std::uint64_t beside_bytes_ = 0;
  Nanoseconds beside_cpu_{0};
  Nanoseconds begin_{0};
  Nanoseconds deadline_{0};
  Nanoseconds cpu_begin_{0};
  Nanoseconds fill_cpu_{0};
  Nanoseconds next_live_{0};
  Measurement measured_;
};

}  // namespace ziggurat::measure
