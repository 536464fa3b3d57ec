// SPDX-License-Identifier: Apache-2.0
// collectives/simulated/simulated_call.cc: what each kind of call does to buffers, and the messages
// of which it consists.
#include "collectives/simulated/simulated_call.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/check.h"
#include "collectives/rank_sum.h"

namespace ziggurat {
namespace {

/// Returns how many of `count` elements `rank` of `ranks` adds up.
std::uint64_t owned(std::uint64_t count, std::size_t ranks, std::size_t rank) noexcept {
  return count * (rank + 1) / ranks - count * rank / ranks;
}

}  // namespace

SimulatedCall::SimulatedCall(Reactor& reactor, std::vector<int> its_members)
    : members(std::move(its_members)) {
  for (std::size_t i = 0; i < members.size(); ++i) parts.emplace_back(reactor);
}

std::string SimulatedCall::mismatch() const {
  for (std::size_t i = 1; i < parts.size(); ++i) {
    if (parts[i].spec.meets(parts[0].spec)) continue;
    return fmt::format("ranks made different calls: rank {} {}, rank {} {}", members[0],
                       describe(parts[0].spec), members[i], describe(parts[i].spec));
  }
  return {};
}

void SimulatedCall::watch(Part& part, AccessLedger& ledger) {
  using enum AccessLedger::Kind;
  part.accesses[0] = ledger.begin(kWrite, part.output, "an exchange");
  const std::byte* const begin = part.input.data();
  const std::byte* const output = part.output.data();
  const bool within = begin >= output && begin < output + part.output.size();
  // A call may work in place, on a slice of its output or of its input.
  if (within || part.input.empty()) return;
  const bool around = output >= begin && output < begin + part.input.size();
  if (!around) {
    part.accesses[1] = ledger.begin(kRead, part.input, "an exchange");
    return;
  }
  part.accesses[0].end();
  part.accesses[0] = ledger.begin(kWrite, part.input, "an exchange");
}

bool SimulatedCall::touches(const AbsentMemory& absent) const {
  const auto lacks = [&](const Part& part) {
    return (!part.input.empty() && absent.lacks(part.input.data())) ||
           (!part.output.empty() && absent.lacks(part.output.data()));
  };
  const bool first = lacks(parts[0]);
  for (const Part& part : parts) {
    ZIGGURAT_CHECK(lacks(part) == first, "{}: some ranks have its bytes and others have not",
                   describe(part.spec));
  }
  return first;
}

void SimulatedCall::reduce_values() {
  std::vector<const std::byte*> values;
  for (const Part& part : parts) values.push_back(part.output.data());
  std::vector<std::byte> result(parts[0].output.size());
  combine_in_rank_order(values, parts[0].spec, result.data());
  for (Part& part : parts) copy_bytes(result, part.output);
}

void SimulatedCall::reduce_elements() {
  const bool scatters = parts[0].spec.kind == CallKind::kReduceScatter;
  const DType dtype = dtype_of(parts[0].spec.element);
  const std::size_t bytes = parts[0].output.size();
  std::vector<const std::byte*> contributions(parts.size());
  const auto sum_at = [&](std::size_t offset, std::byte* to) {
    for (std::size_t r = 0; r < parts.size(); ++r)
      contributions[r] = parts[r].input.data() + offset;
    sum_in_rank_order(contributions, dtype, bytes / size_bytes(dtype), to);
  };
  if (scatters) {
    for (std::size_t r = 0; r < parts.size(); ++r) sum_at(r * bytes, parts[r].output.data());
    return;
  }
  std::vector<std::byte> sum(bytes);
  sum_at(0, sum.data());
  for (Part& part : parts) copy_bytes(sum, part.output);
}

void SimulatedCall::move_bytes() {
  const std::size_t n = parts.size();
  const CallSpec& spec = parts[0].spec;
  switch (spec.kind) {
    case CallKind::kAllGather:
      for (Part& to : parts) {
        const std::size_t slice = to.input.size();
        for (std::size_t r = 0; r < n; ++r)
          copy_bytes(parts[r].input, to.output.subspan(r * slice, slice));
      }
      return;
    case CallKind::kAllToAll:
      for (std::size_t to = 0; to < n; ++to) {
        const std::size_t slice = parts[to].output.size() / n;
        for (std::size_t r = 0; r < n; ++r)
          copy_bytes(parts[r].input.subspan(to * slice, slice),
                     parts[to].output.subspan(r * slice, slice));
      }
      return;
    case CallKind::kReduceScatter:
    case CallKind::kAllReduce: return reduce_elements();
    case CallKind::kAllReduceValues: return reduce_values();
    case CallKind::kSend: return copy_bytes(parts[0].input, parts[1].output);
    case CallKind::kBarrier:
    case CallKind::kRecv: return;
  }
}

std::vector<Nanoseconds> SimulatedCall::times(SimulatedNetwork& network, Nanoseconds now) const {
  const std::size_t n = parts.size();
  const CallSpec& spec = parts[0].spec;
  const std::vector<Nanoseconds> ready(n, now);
  const std::size_t element = size_bytes(spec.element);
  const bool in_ring = network.route() == Route::kRing;
  const auto all_pairs = [&](std::uint64_t size_bytes) {
    return network.exchange(
        members, [size_bytes](auto, auto) { return static_cast<std::int64_t>(size_bytes); }, ready);
  };
  switch (spec.kind) {
    case CallKind::kAllReduce: {
      const auto owned_bytes = [&](std::size_t rank) {
        return static_cast<std::int64_t>(owned(spec.count, n, rank) * element);
      };
      if (in_ring) {
        const auto slice = [&](std::size_t rank) { return owned(spec.count, n, rank) * element; };
        return network.pass_around(members, slice, network.pass_around(members, slice, ready));
      }
      const auto added = network.exchange(
          members, [&](auto, std::size_t to) { return owned_bytes(to); }, ready);
      return network.exchange(
          members, [&](std::size_t from, auto) { return owned_bytes(from); }, added);
    }
    case CallKind::kSend:
      return network.exchange(
          members,
          [&](std::size_t from, auto) {
            return from == 0 ? static_cast<std::int64_t>(spec.count) : -1;
          },
          ready);
    case CallKind::kAllGather:
    case CallKind::kReduceScatter:
      if (!in_ring) break;
      return network.pass_around(
          members, [&](auto) { return spec.count * element; }, ready);
    case CallKind::kAllReduceValues:
    case CallKind::kAllToAll:
    case CallKind::kBarrier:
    case CallKind::kRecv: break;
  }
  return all_pairs(spec.count * element);
}

void SimulatedCall::fail(const std::exception_ptr& its_error) {
  if (error) return;
  error = its_error;
  for (Part& part : parts) {
    for (AccessLedger::Access& access : part.accesses) access.end();
    if (!part.done.is_set()) part.done.fail(error);
  }
}

}  // namespace ziggurat
