// SPDX-License-Identifier: Apache-2.0
// tiers/pool/account.cc: keeps sums and peaks, and formats the one-line account.
#include "tiers/pool/account.h"

#include <algorithm>
#include <vector>

#include "base/bytes.h"
#include "base/check.h"

namespace ziggurat {
namespace {

constexpr std::size_t index_of(Purpose purpose) noexcept {
  return static_cast<std::size_t>(purpose);
}

}  // namespace

std::string_view to_string(Purpose purpose) noexcept {
  switch (purpose) {
    case Purpose::kParams: return "params";
    case Purpose::kGradients: return "gradients";
    case Purpose::kAccumulators: return "accumulators";
    case Purpose::kOptimizer: return "optimizer";
    case Purpose::kKeptRecords: return "kept records";
    case Purpose::kActivations: return "activations";
    case Purpose::kStaging: return "staging";
    case Purpose::kCount: break;
  }
  return "?";
}

void Account::add(Purpose purpose, std::uint64_t size_bytes) noexcept {
  std::uint64_t& used = used_by_[index_of(purpose)];
  used += size_bytes;
  used_bytes_ += size_bytes;
  ZIGGURAT_CHECK(used_bytes_ <= capacity_bytes_, "{} bytes used of {}", used_bytes_,
                 capacity_bytes_);
  peak_by_[index_of(purpose)] = std::max(peak_by_[index_of(purpose)], used);
  peak_bytes_ = std::max(peak_bytes_, used_bytes_);
}

void Account::subtract(Purpose purpose, std::uint64_t size_bytes) noexcept {
  std::uint64_t& used = used_by_[index_of(purpose)];
  ZIGGURAT_CHECK(size_bytes <= used, "{} bytes of {} returned, {} are out", size_bytes,
                 to_string(purpose), used);
  used -= size_bytes;
  used_bytes_ -= size_bytes;
}

std::uint64_t Account::used_bytes(Purpose purpose) const noexcept {
  return used_by_[index_of(purpose)];
}

std::uint64_t Account::peak_bytes(Purpose purpose) const noexcept {
  return peak_by_[index_of(purpose)];
}

std::string Account::text() const {
  std::vector<Purpose> holders;
  for (std::size_t i = 0; i < used_by_.size(); ++i) {
    if (used_by_[i] > 0) holders.push_back(static_cast<Purpose>(i));
  }
  std::stable_sort(holders.begin(), holders.end(),
                   [this](Purpose a, Purpose b) { return used_bytes(a) > used_bytes(b); });
  std::string line;
  for (const Purpose purpose : holders) {
    line += fmt::format("{}{} {}", line.empty() ? "" : ", ", to_string(purpose),
                        format_bytes(used_bytes(purpose)));
  }
  return fmt::format("{} of {}", line.empty() ? "nothing" : line, format_bytes(capacity_bytes_));
}

}  // namespace ziggurat
