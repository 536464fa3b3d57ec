// SPDX-License-Identifier: Apache-2.0
// integrations/measure/svg.cc: draws the axes of a plot first, and then its marks. Every plot has
// its own coordinates.
#include "integrations/measure/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "base/bytes.h"
#include "integrations/measure/table.h"

namespace ziggurat::measure {
namespace {

struct Frame {
  double width, height;
  double left = 52, right = 14, top = 14, bottom = 40;
  double inner_width() const { return width - left - right; }
  double inner_height() const { return height - top - bottom; }
  double x(double share) const { return left + share * inner_width(); }
  double y(double share) const { return top + (1 - share) * inner_height(); }
};

std::string open_svg(const Frame& frame, std::string_view id, std::string_view title) {
  return fmt::format(
      "<svg class=\"{}\" viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\">"
      "<title>{}</title>\n",
      id, frame.width, frame.height, escaped(title));
}

std::string text(double x, double y, std::string_view style, std::string_view anchor,
                 std::string_view what) {
  return fmt::format("<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n",
                     style, x, y, anchor, escaped(what));
}

std::string line(double x1, double y1, double x2, double y2, std::string_view style) {
  return fmt::format(
      "<line class=\"{}\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>\n", style, x1,
      y1, x2, y2);
}

std::string rectangle(double x, double y, double width, double height, std::string_view style) {
  return fmt::format(
      "<rect class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" "
      "height=\"{:.1f}\"/>\n",
      style, x, y, std::max(width, 0.0), std::max(height, 0.0));
}

/// Returns 1, 2 or 5 times a power of ten, so that `top` has at most `most` steps.
double tick_step(double top, int most) {
  const double raw = top / most;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (raw <= factor * power) return factor * power;
  }
  return 10 * power;
}

std::string y_axis(const Frame& frame, double top, std::string_view label) {
  std::string out;
  const double step = tick_step(top, 4);
  for (double value = 0; value <= top * 1.0001; value += step) {
    const double y = frame.y(value / top);
    out += line(frame.left, y, frame.width - frame.right, y, "grid");
    out += text(frame.left - 6, y + 4, "tick", "end", fmt::format("{:g}", value));
  }
  out += fmt::format(
      "<text class=\"axis\" transform=\"translate(14 {:.1f}) rotate(-90)\" "
      "text-anchor=\"middle\">{}</text>\n",
      frame.top + frame.inner_height() / 2, escaped(label));
  return out;
}

std::string x_label(const Frame& frame, std::string_view label) {
  return text(frame.left + frame.inner_width() / 2, frame.height - 6, "axis", "middle", label);
}

/// Returns the ticks of a logarithmic axis around [from_us, to_us], at 1, 2 and 5 times the powers
/// of ten.
std::vector<double> log_ticks(double from_us, double to_us) {
  std::vector<double> ticks;
  for (double power = 1; power < 1e10; power *= 10) {
    for (const double factor : {1.0, 2.0, 5.0}) {
      const double tick = factor * power;
      if (!ticks.empty() && ticks.back() >= to_us) return ticks;
      if (tick <= from_us) ticks.clear();
      ticks.push_back(tick);
    }
  }
  return ticks;
}

/// Returns the label of a tick, such as "20 ms".
std::string tick_text(double us) {
  if (us < 1e3) return fmt::format("{:g} us", us);
  return us < 1e6 ? fmt::format("{:g} ms", us / 1e3) : fmt::format("{:g} s", us / 1e6);
}

/// Draws lines at the percentiles. Their names are in the margin, where they never meet.
std::string latency_marks(const Frame& frame, const Latencies& latency,
                          const std::function<double(double)>& x) {
  struct Mark {
    double quantile;
    const char* name;
    const char* style;
  };
  constexpr std::array<Mark, 3> kMarks{
      {{0.5, "p50", "mark"}, {0.99, "p99", "mark dashed"}, {0.999, "p99.9", "mark dotted"}}};
  const double margin = frame.width - frame.right + 10;
  double y = frame.top + 14;
  std::string out;
  for (const Mark& mark : kMarks) {
    const double us = latency.quantile_us(mark.quantile);
    out += line(x(us), frame.top, x(us), frame.height - frame.bottom, mark.style);
    out += line(margin, y - 4, margin + 20, y - 4, mark.style);
    out += text(margin + 26, y, "note", "start", fmt::format("{} {}", mark.name, latency_text(us)));
    y += 20;
  }
  return out;
}

}  // namespace

std::string escaped(std::string_view raw) {
  std::string out;
  for (const char c : raw) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
    }
  }
  return out;
}

std::string bandwidth_plot(const Row& row, double top_gb_per_s) {
  const Measurement& median = row.median();
  const Frame frame{.width = 460, .height = 190};
  const double top = std::max(top_gb_per_s, 0.1);
  const double seconds = std::max(median.seconds, 0.1);
  std::string out = open_svg(frame, "bandwidth", "GB/s over time: " + to_string(row.workload));
  out += y_axis(frame, top, "GB/s");
  const double step = tick_step(seconds, 6);
  for (double at = 0; at <= seconds * 1.0001; at += step)
    out +=
        text(frame.x(at / seconds), frame.height - 24, "tick", "middle", fmt::format("{:g}", at));
  out += x_label(frame, "seconds");
  std::string points;
  // The last tenth of a second is mostly not a whole one, so it is left out.
  const std::size_t whole = std::min(median.gb_per_tenth.size(),
                                     static_cast<std::size_t>(std::floor(median.seconds * 10)));
  for (std::size_t i = 0; i < whole; ++i) {
    const double at = (static_cast<double>(i) + 0.5) / 10;
    const double rate = std::min(median.gb_per_tenth[i] * 10, top);
    points +=
        fmt::format("{:.1f},{:.1f} ", frame.x(std::min(at / seconds, 1.0)), frame.y(rate / top));
  }
  const double mean = frame.y(std::min(median.gb_per_s() / top, 1.0));
  out += line(frame.left, mean, frame.width - frame.right, mean, "mean");
  out += fmt::format("<polyline class=\"curve\" points=\"{}\"/>\n", points);
  return out + "</svg>\n";
}

std::string latency_plot(const Row& row) {
  const Latencies& latency = row.median().latency;
  const Frame frame{.width = 460, .height = 190, .right = 122};
  std::string out = open_svg(frame, "latency", "Latency: " + to_string(row.workload));
  const std::vector<Latencies::Bucket> buckets = latency.buckets();
  if (buckets.empty()) return out + "</svg>\n";
  const std::vector<double> ticks = log_ticks(buckets.front().from_us, buckets.back().to_us);
  const double low = std::log(ticks.front());
  const double high = std::log(ticks.back());
  const auto x = [&](double us) {
    return frame.x(std::clamp((std::log(std::max(us, 1.0)) - low) / (high - low), 0.0, 1.0));
  };
  double top = 0;
  for (const auto& bucket : buckets) {
    top = std::max(top,
                   100 * static_cast<double>(bucket.count) / static_cast<double>(latency.count()));
  }
  out += y_axis(frame, top, "% of transfers");
  double labelled = -100;
  for (const double tick : ticks) {
    out += line(x(tick), frame.top, x(tick), frame.height - frame.bottom, "grid");
    if (x(tick) - labelled < 44) continue;
    labelled = x(tick);
    out += text(labelled, frame.height - 24, "tick", "middle", tick_text(tick));
  }
  out += x_label(frame, "latency (logarithmic)");
  for (const auto& bucket : buckets) {
    const double share =
        100 * static_cast<double>(bucket.count) / static_cast<double>(latency.count()) / top;
    out += rectangle(x(bucket.from_us), frame.y(share),
                     std::max(1.0, x(bucket.to_us) - x(bucket.from_us)),
                     frame.inner_height() * share, "bar");
  }
  return out + latency_marks(frame, latency, x) + "</svg>\n";
}

std::string fio_plot(const std::vector<Row>& rows) {
  std::vector<const Row*> compared;
  double top = 1.2;
  for (const Row& row : rows) {
    if (!row.ratio() || refused(row.flags())) continue;
    compared.push_back(&row);
    top = std::max(top, *row.ratio() * 1.1);
  }
  if (compared.empty()) return "";
  constexpr double kBar = 34;
  const Frame frame{.width = 940,
                    .height = 54 + kBar * static_cast<double>(compared.size()),
                    .left = 120,
                    .right = 330,
                    .top = 8,
                    .bottom = 40};
  std::string out = open_svg(frame, "fio", "Ratio to fio on the same file");
  const double step = tick_step(top, 6);
  for (double value = 0; value <= top; value += step) {
    const double x = frame.x(value / top);
    out += line(x, frame.top, x, frame.height - frame.bottom, "grid");
    out += text(x, frame.height - 24, "tick", "middle", fmt::format("{:g}", value));
  }
  double y = frame.top + 6;
  for (const Row* const row : compared) {
    out += text(frame.left - 8, y + 16, "label", "end", to_string(row->workload));
    out += rectangle(frame.left, y, frame.inner_width() * *row->ratio() / top, kBar - 12, "bar");
    out += text(frame.width - frame.right + 12, y + 16, "note", "start",
                fmt::format("{:.2f}: {:.2f}, fio {:.2f} GB/s; CPU {:.4f}, fio {:.4f} s/GB",
                            *row->ratio(), row->gb_per_s(), *row->fio_gb_per_s(),
                            row->cpu_s_per_gb(), *row->fio_cpu_s_per_gb()));
    y += kBar;
  }
  const double one = frame.x(1 / top);
  out += line(one, frame.top, one, frame.height - frame.bottom, "mean");
  out += text(frame.left + frame.inner_width() / 2, frame.height - 6, "axis", "middle",
              "Ziggurat's GB/s over fio's (1: the same)");
  return out + "</svg>\n";
}

std::string tune_plot(const TuneResult& tuned, std::string_view kind) {
  const auto rate = [&](const TuneCell& cell) {
    if (kind == "read") return cell.read_gb_per_s;
    return kind == "write" ? cell.write_gb_per_s : cell.mix_gb_per_s;
  };
  std::vector<std::uint32_t> blocks;
  std::vector<std::uint32_t> depths;
  double most = 0;
  double least = 1e30;
  for (const TuneCell& cell : tuned.cells) {
    if (std::find(blocks.begin(), blocks.end(), cell.block_bytes) == blocks.end())
      blocks.push_back(cell.block_bytes);
    if (std::find(depths.begin(), depths.end(), cell.depth) == depths.end())
      depths.push_back(cell.depth);
    most = std::max(most, rate(cell));
    least = std::min(least, rate(cell));
  }
  if (most <= 0) return "";
  std::sort(depths.begin(), depths.end());
  const Frame frame{.width = 460, .height = 210, .left = 76, .top = 24};
  std::string out = open_svg(frame, "heat", fmt::format("GB/s by block and depth: {}", kind));
  out += text(frame.left, 14, "label", "start", fmt::format("{}, GB/s", kind));
  const double width = frame.inner_width() / static_cast<double>(depths.size());
  const double height = frame.inner_height() / static_cast<double>(blocks.size());
  for (const TuneCell& cell : tuned.cells) {
    const auto column = std::find(depths.begin(), depths.end(), cell.depth) - depths.begin();
    const auto level = std::find(blocks.begin(), blocks.end(), cell.block_bytes) - blocks.begin();
    const double x = frame.left + width * static_cast<double>(column);
    const double y =
        frame.top +
        height * static_cast<double>(static_cast<std::ptrdiff_t>(blocks.size()) - 1 - level);
    const double warmth = most > least ? (rate(cell) - least) / (most - least) : 1;
    const auto shade = static_cast<int>(std::round(warmth * 4));
    out += rectangle(x + 1, y + 1, width - 2, height - 2, fmt::format("heat{}", shade));
    out += text(x + width / 2, y + height / 2 + 4, shade >= 3 ? "on-heat" : "note", "middle",
                fmt::format("{:.2f}", rate(cell)));
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const double y = frame.top + height * (static_cast<double>(blocks.size() - 1 - i) + 0.5);
    out += text(frame.left - 6, y + 4, "tick", "end", format_bytes(blocks[i]));
  }
  for (std::size_t i = 0; i < depths.size(); ++i) {
    out += text(frame.left + width * (static_cast<double>(i) + 0.5), frame.height - 24, "tick",
                "middle", std::to_string(depths[i]));
  }
  out += x_label(frame, "transfers in flight");
  return out + "</svg>\n";
}

}  // namespace ziggurat::measure
