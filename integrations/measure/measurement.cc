// SPDX-License-Identifier: Apache-2.0
// integrations/measure/measurement.cc: reads clocks, and adds up bytes by tenths of a second.
#include "integrations/measure/measurement.h"

#include <fmt/format.h>
#include <time.h>

#include <numeric>
#include <utility>

#include "base/runtime/seconds.h"
#include "integrations/measure/adam_load.h"

namespace ziggurat::measure {
namespace {

constexpr Nanoseconds kTenth = std::chrono::milliseconds(100);
constexpr std::size_t kTenths = 10;
constexpr Nanoseconds kLive = std::chrono::milliseconds(250);

Nanoseconds read_clock(clockid_t clock) noexcept {
  timespec now{};
  ::clock_gettime(clock, &now);
  return std::chrono::seconds(now.tv_sec) + Nanoseconds(now.tv_nsec);
}

}  // namespace

double in_seconds(Nanoseconds time) noexcept { return std::chrono::duration<double>(time).count(); }
double seconds_since(Nanoseconds start) noexcept { return in_seconds(monotonic_now() - start); }

Nanoseconds process_cpu() noexcept { return read_clock(CLOCK_PROCESS_CPUTIME_ID); }
Nanoseconds thread_cpu() noexcept { return read_clock(CLOCK_THREAD_CPUTIME_ID); }

std::vector<double> Measurement::per_second() const {
  std::vector<double> whole;
  const auto count = static_cast<std::size_t>(seconds);
  for (std::size_t i = 0; i < count && (i + 1) * kTenths <= gb_per_tenth.size(); ++i) {
    const auto first = gb_per_tenth.begin() + static_cast<std::ptrdiff_t>(i * kTenths);
    whole.push_back(std::accumulate(first, first + kTenths, 0.0));
  }
  return whole;
}

Recorder::Recorder(std::string name, double seconds, const Progress& progress,
                   const AdamLoad* beside)
    : name_(std::move(name)), seconds_(seconds), progress_(progress), beside_(beside) {}

void Recorder::begin() {
  measured_ = {};
  if (beside_ != nullptr) {
    beside_bytes_ = beside_->bytes();
    beside_cpu_ = beside_->cpu();
  }
  cpu_begin_ = process_cpu();
  begin_ = monotonic_now();
  next_live_ = begin_ + kLive;
  deadline_ = begin_ + nanoseconds_of(seconds_);
}

void Recorder::add(IoKind kind, std::uint64_t size_bytes, Nanoseconds started) {
  const Nanoseconds now = monotonic_now();
  (kind == IoKind::kRead ? measured_.read_bytes : measured_.write_bytes) += size_bytes;
  measured_.latency.add(now - started);
  const auto tenth = static_cast<std::size_t>((now - begin_) / kTenth);
  if (measured_.gb_per_tenth.size() <= tenth) measured_.gb_per_tenth.resize(tenth + 1);
  measured_.gb_per_tenth[tenth] += static_cast<double>(size_bytes) / 1e9;
  if (now < next_live_) return;
  next_live_ = now + kLive;
  const double elapsed = in_seconds(now - begin_);
  progress_.live(fmt::format("{}: {:.1f} of {:.1f} s, {:.2f} GB/s", name_, elapsed, seconds_,
                             measured_.gb() / elapsed));
}

Measurement Recorder::finish(Nanoseconds compute_cpu) {
  measured_.seconds = in_seconds(monotonic_now() - begin_);
  const Nanoseconds cpu = process_cpu() - cpu_begin_;
  if (beside_ != nullptr) {
    compute_cpu += beside_->cpu() - beside_cpu_;
    measured_.adam_gb_per_s =
        static_cast<double>(beside_->bytes() - beside_bytes_) / 1e9 / measured_.seconds;
  }
  measured_.fill_cpu_s = in_seconds(fill_cpu_);
  measured_.compute_cpu_s = in_seconds(compute_cpu);
  measured_.io_cpu_s = in_seconds(cpu - fill_cpu_ - compute_cpu);
  return std::move(measured_);
}

}  // namespace ziggurat::measure
