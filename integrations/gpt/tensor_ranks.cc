// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/tensor_ranks.cc: each function makes one call of a communicator.
#include "integrations/gpt/tensor_ranks.h"

#include "core/schedule/context.h"

namespace ziggurat::gpt {
namespace {

std::span<std::byte> bytes_of(Array values, std::int64_t count) {
  return {values.data, static_cast<std::size_t>(count) * size_bytes(values.dtype)};
}
std::span<const std::byte> bytes_of(ConstArray values, std::int64_t count) {
  return {values.data, static_cast<std::size_t>(count) * size_bytes(values.dtype)};
}

}  // namespace

TensorRanks::TensorRanks(Runtime& runtime, const Place& place)
    : runtime_(runtime), part_{.rank = place.tensor, .ranks = place.tensor_ranks()} {
  runtime.reactor.block_on([](TensorRanks& self, const Place& its) -> Task<> {
    self.group_ = self.runtime_.ranks->split(its.tensor_group);
    co_return;
  }(*this, place));
}

TensorRanks::~TensorRanks() { runtime_.reactor.destroy(group_); }

/// Waits for `call`, which makes one call of the group on the reactor's thread.
template <class Call>
void TensorRanks::wait_for(const Call& call) {
  const CountedTime waited(runtime_.reactor.clock(), runtime_.metrics, Counter::kWaitRanksNs);
  runtime_.reactor.block_on(
      [](Communicator& group, const Call& make) -> Task<> { co_await make(group); }(*group_, call));
}

void TensorRanks::sum_rows(Array values, const RowShare& rows, std::int64_t width) {
  const std::span<std::byte> all = bytes_of(values, rows.all * width);
  if (rows.own == rows.all) {
    wait_for([&](Communicator& group) { return group.all_reduce(all, values.dtype); });
    return;
  }
  const std::span<std::byte> own = bytes_of(values + rows.first * width, rows.own * width);
  wait_for([&](Communicator& group) { return group.reduce_scatter(all, own, values.dtype); });
}

void TensorRanks::gather_rows(Array values, const RowShare& rows, std::int64_t width) {
  gather_rows(values + rows.first * width, values, rows, width);
}

void TensorRanks::gather_rows(ConstArray own, Array values, const RowShare& rows,
                              std::int64_t width) {
  if (rows.own == rows.all) return;
  wait_for([&](Communicator& group) {
    return group.all_gather(bytes_of(own, rows.own * width), bytes_of(values, rows.all * width));
  });
}

void TensorRanks::gather(std::span<std::byte> bytes) {
  const std::size_t slice = bytes.size() / static_cast<std::size_t>(part_.ranks);
  const auto own = bytes.subspan(static_cast<std::size_t>(part_.rank) * slice, slice);
  wait_for([&](Communicator& group) { return group.all_gather(own, bytes); });
}

void TensorRanks::sum(std::span<float> values) {
  const std::span<std::byte> bytes = std::as_writable_bytes(values);
  wait_for([&](Communicator& group) { return group.all_reduce(bytes, DType::kFloat32); });
}

}  // namespace ziggurat::gpt
