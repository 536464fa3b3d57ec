// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/whole_messages.cc: puts units together of the slices of all ranks, and gives
// other ranks what they ask for.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "core/engine/lent/slice_codes.h"
#include "core/engine/lent/whole_units.h"

namespace ziggurat {
namespace {

using Message = WholeLayout::Message;

/// Copies of fewer bytes are made where they stand: a stream would cost more.
constexpr std::uint64_t kStreamedBytes = 64 * kKiB;

/// Whether a message is received where its slice belongs.
bool goes_straight(const Message& message) {
  return !message.quantized && message.runs.size() == 1;
}

/// Whether two messages are parts of one slice.
bool of_one_slice(const Message& one, const Message& other) {
  return one.runs.size() == 1 && other.runs.size() == 1 && one.runs[0].whole == other.runs[0].whole;
}

}  // namespace

/// Whether the ranks of this node share copies of what comes so: of quantized parameters they keep
/// codes alone.
bool WholeUnits::is_copied(UnitId unit, WholeForm form) const {
  return copies_ && (form == WholeForm::kQuantized || !quantized(unit));
}

/// Returns which rank gives this one the slices that `rank` has.
std::size_t WholeUnits::giver_of(std::size_t rank, UnitId unit, WholeForm form) const {
  if (node_of(rank) == node_of(this->rank()) || !is_copied(unit, form)) return rank;
  return node_of(this->rank()) * node_ranks_ + rank % node_ranks_;
}

TypedSpan<std::byte> WholeUnits::run_in(std::size_t rank, const WholeLayout::Run& run,
                                        std::byte* unit) const {
  const WholeLayout::Range its = layout_.range_of(rank, run);
  return {wholes_[run.whole].dtype, {unit + its.begin, its.bytes}};
}

Task<UnitParamHome::Loading> WholeUnits::load(UnitId unit, std::byte* destination, Need need,
                                              IoPriority priority) {
  Forms& forms = forms_[unit];
  forms.loaded =
      quantized(unit) && forms.exact_wanted == 0 ? WholeForm::kQuantized : WholeForm::kExact;
  Load load{.unit = unit, .form = forms.loaded, .generation = need.generation, .to = destination};
  if (!staging_) co_return co_await put_together(load, need, priority);
  const std::span<std::byte> staging = co_await staging_->take();
  load.to = staging.data();
  UnitParamHome::Loading loading;
  std::exception_ptr error;
  try {
    loading = co_await put_together(load, need, priority);
    if (!loading.stale) {
      const Stream::Copy request{.destination = destination,
                                 .source = staging.data(),
                                 .size_bytes = device_bytes(unit),
                                 .direction = Stream::Direction::kToDevice};
      loading.landed = context_->to_device->copy(request, [](const std::exception_ptr&) {});
    }
  } catch (...) {
    error = std::current_exception();
  }
  context_->spawn_local(give_back(staging, loading.landed));
  if (error) std::rethrow_exception(error);
  co_return loading;
}

/// Gives staging back once it was read. Whoever waits for the copy hears that it has failed.
Task<> WholeUnits::give_back(std::span<std::byte> staging, Event read) {
  try {
    co_await read.wait();
  } catch (const Error&) {
    co_return;  // a copy of which nobody knows how far it has come may still read it
  }
  staging_->give_back(staging);
}

/// Brings the slices of a unit to their places, which the CPU can reach.
Task<UnitParamHome::Loading> WholeUnits::put_together(Load all, Need need, IoPriority priority) {
  const std::size_t first = first_of_group();
  std::vector<UnitService::Came> came(layout_.group_ranks(), UnitService::Came::kWhole);
  WorkGroup loads(context_->reactor);
  for (std::size_t i = 0; i < came.size(); ++i)
    if (first + i != rank()) loads.spawn(load_from(first + i, all, came[i]));
  loads.spawn(load_own(all, need, priority));
  co_await loads.wait_idle();
  UnitParamHome::Loading loading;
  for (std::size_t i = 0; i < came.size(); ++i) {
    if (came[i] == UnitService::Came::kWhole) continue;
    loading.stale = true;
    // What is brought ahead may not be needed any more.
    if (came[i] != UnitService::Came::kStale && priority == IoPriority::kDemand)
      throw of_closed(first + i, all, came[i]);
  }
  co_return loading;
}

/// Makes the error for slices of `owner` that do not come, because it has closed its engine, or the
/// rank that was asked for a copy of them has.
Error WholeUnits::of_closed(std::size_t owner, const Load& load, UnitService::Came came) const {
  const std::size_t asked = giver_of(owner, load.unit, load.form);
  const bool is_giver = came == UnitService::Came::kClosed && asked != owner && asked != rank();
  return {ErrorCode::kUnavailable,
          fmt::format("rank {} has closed its engine, but {} a part of unit {} ('{}'): use the "
                      "model before any rank closes its optimizer",
                      is_giver ? asked : owner, is_giver ? "keeps a copy of" : "has", load.unit,
                      name(load.unit))};
}

Task<> WholeUnits::load_own(Load load, Need need, IoPriority priority) {
  WorkGroup loads(context_->reactor);
  for (const Part& part : parts_[load.unit]) loads.spawn(load_part(part, load, need, priority));
  co_await loads.wait_idle();
}

/// Brings this rank's own slices. Quantized ones have the values that other ranks decode.
Task<> WholeUnits::load_part(const Part& part, Load load, Need need, IoPriority priority) {
  const ReadOnce::Part fetched = co_await parts_read_->fetch(part.unit, need, priority);
  for (const std::size_t w : part.wholes) {
    const std::span<const std::byte> from = own_bytes(w, fetched.bytes);
    std::byte* const to = load.to + layout_.range_of(rank(), w).begin;
    const DType dtype = wholes_[w].dtype;
    if (load.form == WholeForm::kQuantized && wholes_[w].quantized) {
      co_await round_slice(*context_, {dtype, from}, {dtype, {to, from.size()}});
    } else if (from.size() < kStreamedBytes) {
      std::memcpy(to, from.data(), from.size());
    } else if (staging_) {
      const std::function<void()> job = [&] { std::memcpy(to, from.data(), from.size()); };
      co_await context_->workers.run(context_->reactor, {"copy params", 2 * from.size()}, job);
    } else {
      co_await copy(context_->reactor, *context_->to_device,
                    {.destination = to,
                     .source = from.data(),
                     .size_bytes = from.size(),
                     .direction = Stream::Direction::kToDevice});
    }
  }
}

/// Receives large slices where they belong, and small ones and codes beside.
Task<> WholeUnits::load_from(std::size_t rank, Load load, UnitService::Came& came) {
  const std::vector<Message> messages = layout_.messages_of(rank, load.unit, load.form);
  if (messages.empty()) co_return;
  const std::size_t giver = giver_of(rank, load.unit, load.form);
  if (giver == this->rank()) {
    co_await load_copy(rank, load, came);
    co_return;
  }
  std::uint64_t beside_bytes = 0;
  for (const Message& message : messages)
    if (!goes_straight(message)) beside_bytes = std::max(beside_bytes, message.bytes);
  std::vector<std::byte> beside(beside_bytes);
  std::vector<std::span<std::byte>> into;
  for (const Message& message : messages)
    into.push_back(goes_straight(message) ? run_in(rank, message.runs[0], load.to).bytes
                                          : std::span(beside).first(message.bytes));
  const UnitService::Landed landed = [&](std::size_t i) -> Task<> {
    if (!goes_straight(messages[i])) co_await put(rank, messages[i], into[i], load.to);
  };
  const UnitService::Asked asked{.of = static_cast<int>(rank),
                                 .unit = load.unit,
                                 .generation = load.generation,
                                 .form = load.form};
  came = co_await bring(giver, asked, into, landed);
}

/// Puts the slices of a message where they belong.
Task<> WholeUnits::put(std::size_t rank, const Message& message, std::span<const std::byte> from,
                       std::byte* unit) {
  for (const WholeLayout::Run& run : message.runs) {
    const TypedSpan<std::byte> to = run_in(rank, run, unit);
    if (message.quantized) {
      co_await decode_slice(*context_, from.first(run.bytes), to);
    } else {
      std::memcpy(to.bytes.data(), from.data(), run.bytes);
    }
    from = from.subspan(run.bytes);
  }
}

/// Takes slices of a rank of another node from the copy that this rank keeps for its node.
Task<> WholeUnits::load_copy(std::size_t rank, Load load, UnitService::Came& came) {
  const UnitService::Asked asked{.of = static_cast<int>(rank),
                                 .unit = load.unit,
                                 .generation = load.generation,
                                 .form = load.form};
  const NodeCopies::Copy copy = co_await copy_of(asked);
  came = copy.came;
  if (came != UnitService::Came::kWhole) co_return;
  std::span<const std::byte> left = *copy.bytes;
  for (const Message& message : layout_.messages_of(rank, load.unit, load.form)) {
    co_await put(rank, message, left.first(message.bytes), load.to);
    left = left.subspan(message.bytes);
  }
}

Task<NodeCopies::Copy> WholeUnits::copy_of(UnitService::Asked asked) {
  const auto rank = static_cast<std::size_t>(asked.of);
  const std::vector<Message> messages = layout_.messages_of(rank, asked.unit, asked.form);
  std::uint64_t bytes = 0;
  for (const Message& message : messages) bytes += message.bytes;
  const NodeCopies::Bring from_owner = [&](std::span<std::byte> all) -> Task<UnitService::Came> {
    std::vector<std::span<std::byte>> into;
    for (const Message& message : messages) {
      into.push_back(all.first(message.bytes));
      all = all.subspan(message.bytes);
    }
    const UnitService::Landed landed = [](std::size_t) -> Task<> { co_return; };
    co_return co_await bring(rank, asked, into, landed);
  };
  co_return co_await copies_->get(rank, asked.unit, asked.generation, bytes, from_owner);
}

Task<UnitService::Came> WholeUnits::bring(std::size_t from, UnitService::Asked asked,
                                          std::span<const std::span<std::byte>> messages,
                                          const UnitService::Landed& landed) {
  const UnitService::Came came =
      co_await service_->bring(static_cast<int>(from), asked, messages, landed);
  if (came != UnitService::Came::kWhole) co_return came;
  std::uint64_t bytes = 0;
  for (const std::span<std::byte> message : messages) bytes += message.size();
  from_ranks_bytes_ += bytes;
  if (node_of(from) != node_of(rank())) from_nodes_bytes_ += bytes;
  co_return came;
}

/// Gives another rank this rank's slices of a unit, or the copy of another rank's.
Task<UnitService::Came> WholeUnits::give(UnitService::Asked asked, const UnitService::Give& give) {
  const auto of = static_cast<std::size_t>(asked.of);
  const std::vector<Message> messages = layout_.messages_of(of, asked.unit, asked.form);
  if (of == rank()) {
    co_await give_slices(asked.unit, messages, give);
    co_return UnitService::Came::kWhole;
  }
  const NodeCopies::Copy copy = co_await copy_of(asked);
  if (copy.came != UnitService::Came::kWhole) co_return copy.came;
  std::span<const std::byte> left = *copy.bytes;
  for (const Message& message : messages) {
    co_await give(left.first(message.bytes));
    left = left.subspan(message.bytes);
  }
  co_return copy.came;
}

/// Gives another rank this rank's slices of a unit. While it waits for memory of the pool it has
/// none: others may wait for that.
Task<> WholeUnits::give_slices(StreamedUnit unit, const std::vector<Message>& messages,
                               const UnitService::Give& give) {
  for (std::size_t m = 0; m < messages.size();) {
    std::size_t end = m + 1;
    while (end < messages.size() && of_one_slice(messages[m], messages[end])) ++end;
    const std::span its = std::span(messages).subspan(m, end - m);
    m = end;
    const bool alone = its[0].runs.size() == 1;
    std::vector<std::byte> together(alone ? 0 : its[0].bytes);
    for (const Part& part : parts_[unit]) {
      const auto is_in_part = [&](const WholeLayout::Run& run) {
        return std::ranges::find(part.wholes, run.whole) != part.wholes.end();
      };
      if (std::ranges::none_of(its[0].runs, is_in_part)) continue;
      co_await context_->gates.gate(part.unit).wait();
      const UnitUses::Use reading = co_await state_.reading(part.unit);
      const Need need{.generation = state_.generation(), .position = 0};
      const ReadOnce::Part fetched =
          co_await parts_read_->fetch(part.unit, need, IoPriority::kDemand);
      if (alone) {
        co_await give_slice(its, fetched.bytes, give);
        continue;
      }
      std::span<std::byte> to = together;
      for (const WholeLayout::Run& run : its[0].runs) {
        if (is_in_part(run))
          co_await fill(run, its[0].quantized, fetched.bytes, to.first(run.bytes));
        to = to.subspan(run.bytes);
      }
    }
    if (!alone) co_await give(together);
  }
}

/// Gives a large slice, of which `part` is the unit of the table.
Task<> WholeUnits::give_slice(std::span<const Message> messages, std::span<const std::byte> part,
                              const UnitService::Give& give) {
  std::vector<std::byte> codes;
  for (const Message& message : messages) {
    const WholeLayout::Run& run = message.runs[0];
    if (!message.quantized) {
      co_await give(own_bytes(run.whole, part));
      continue;
    }
    codes.resize(message.bytes);
    co_await fill(run, message.quantized, part, codes);
    co_await give(codes);
  }
}

/// Makes of this rank's slice what travels.
Task<> WholeUnits::fill(WholeLayout::Run run, bool quantized, std::span<const std::byte> part,
                        std::span<std::byte> to) {
  const TypedSpan<const std::byte> own{wholes_[run.whole].dtype, own_bytes(run.whole, part)};
  const TypedSpan<const std::byte> its = own.subspan(run.first, run.count);
  if (quantized) {
    co_await encode_slice(*context_, its, to);
  } else {
    copy_bytes(its.bytes, to);
  }
}

}  // namespace ziggurat
