// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/whole_model.cc: pieces with their counts, to rank 0; the parts of a layer lie
// between each other there.
#include "core/checkpoint/whole_model.h"

#include <algorithm>
#include <utility>

#include "core/sharding/tensor_part.h"

namespace ziggurat {

WholeModel::WholeModel(ModelSpec model, Layout layout, Reactor& reactor, Communicator& channel,
                       ReadOwn read_own)
    : model_(std::move(model)),
      layout_(layout),
      reactor_(reactor),
      channel_(channel),
      read_own_(std::move(read_own)),
      rank_(channel.rank()) {}

void WholeModel::read(UnitId unit, const Consume& consume) {
  if (rank_ / layout_.parts >= layout_.slices) return;  // a copy
  if (rank_ > 0) return give(unit);
  if (layout_.parts == 1) return take(unit, 0, consume);
  take_parts(unit, consume);
}

/// Pieces, each after its count, then a count of 0.
void WholeModel::give(UnitId unit) {
  const Consume give_piece = [this](std::span<const float> values) {
    const std::uint64_t count = values.size();
    send(std::as_bytes(std::span(&count, 1)));
    if (count > 0) send(std::as_bytes(values));
  };
  read_own_(unit, give_piece);
  give_piece({});
}

/// What the ranks of tensor-parallel part `part` have of `unit`.
void WholeModel::take(UnitId unit, int part, const Consume& consume) {
  for (int slice = 0; slice < layout_.slices; ++slice) {
    const int from = slice * layout_.parts + part;
    if (from > 0)
      take_from(from, consume);
    else
      read_own_(unit, consume);
  }
}

void WholeModel::take_from(int rank, const Consume& consume) {
  std::vector<float> values;
  for (;;) {
    std::uint64_t count = 0;
    recv(std::as_writable_bytes(std::span(&count, 1)), rank);
    if (count == 0) return;
    values.resize(count);
    recv(std::as_writable_bytes(std::span(values)), rank);
    consume(values);
  }
}

/// Whole at once.
void WholeModel::take_parts(UnitId unit, const Consume& consume) {
  const UnitSpec part = part_of(model_.units[unit], layout_.parts);
  std::vector<float> whole(model_.units[unit].count());
  std::vector<float> values;
  for (int rank = 0; rank < layout_.parts; ++rank) {
    values.clear();
    take(unit, rank, [&](std::span<const float> more) {
      values.insert(values.end(), more.begin(), more.end());
    });
    for_each_run(
        part, {.rank = rank, .ranks = layout_.parts}, 0, values.size(), [&](const PartRun& run) {
          std::copy_n(values.data() + run.begin, run.count, whole.data() + run.whole_begin);
        });
  }
  consume(whole);
}

void WholeModel::send(std::span<const std::byte> bytes) {
  reactor_.block_on([](Communicator& channel, std::span<const std::byte> its) -> Task<> {
    co_await channel.send(its, 0);
  }(channel_, bytes));
}

void WholeModel::recv(std::span<std::byte> bytes, int from) {
  reactor_.block_on([](Communicator& channel, std::span<std::byte> its, int rank) -> Task<> {
    co_await channel.recv(its, rank);
  }(channel_, bytes, from));
}

}  // namespace ziggurat
