// SPDX-License-Identifier: Apache-2.0
// integrations/c/open_progress.cc: shows what is done, with its rate since it began.
#include "integrations/c/open_progress.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <string>

#include "base/bytes.h"

namespace ziggurat {
namespace {

using SteadyClock = std::chrono::steady_clock;
constexpr std::chrono::seconds kSilence{2};
constexpr std::chrono::milliseconds kBetween{200};

struct Line {
  std::string what;
  SteadyClock::time_point begin;
  SteadyClock::time_point shown;
  bool on_screen = false;
};

void write(const std::string& text) {
  static_cast<void>(std::fwrite(text.data(), 1, text.size(), stderr));
  static_cast<void>(std::fflush(stderr));
}

}  // namespace

std::function<void(const char*, std::uint64_t, std::uint64_t)> open_progress() {
  return [line = std::make_shared<Line>()](const char* what, std::uint64_t done_bytes,
                                           std::uint64_t total_bytes) {
    const SteadyClock::time_point now = SteadyClock::now();
    if (line->what != what) *line = {.what = what, .begin = now, .shown = now};
    if (done_bytes >= total_bytes) {
      if (line->on_screen) write("\r\x1b[K");
      line->on_screen = false;
      return;
    }
    if (now - line->begin < kSilence || now - line->shown < kBetween) return;
    const double seconds = std::chrono::duration<double>(now - line->begin).count();
    const double rate = static_cast<double>(done_bytes) / seconds;
    const auto left = static_cast<double>(total_bytes - done_bytes);
    line->shown = now;
    line->on_screen = true;
    write(fmt::format("\r\x1b[Kziggurat: {}: {} of {}, {:.2f} GB/s, {:.0f} s to go", what,
                      format_bytes(done_bytes), format_bytes(total_bytes), rate / 1e9,
                      rate > 0 ? left / rate : 0.0));
  };
}

}  // namespace ziggurat
