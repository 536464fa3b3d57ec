// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/param_home.cc: what homes of parameters share.
#include "core/schedule/homes/param_home.h"

#include <algorithm>
#include <utility>

namespace ziggurat {

TypedDeviceSpan<std::byte> ParamHome::destination_on_device(
    ChunkId id, DeviceSpan<std::byte> staging) const noexcept {
  return {context_.table.chunk_dtype(id), staging.first(context_.table.chunk(id).param_bytes())};
}

Task<> ParamHome::publish_from_device(ChunkId id, TypedDeviceSpan<const std::byte> values,
                                      std::span<std::byte> item) {
  const TypedSpan<std::byte> host = destination(id, item);
  co_await context_.copy_to_host(host.bytes, values.bytes);
  co_await publish(id, host, {});
}

Task<> ParamHome::publish_record(ChunkId id, ParamSteps steps, std::span<const std::byte> record,
                                 std::span<std::byte> item, std::span<const ParamRun> runs) {
  const TypedSpan<std::byte> param = destination(id, item);
  const ChunkTable& table = context_.table;
  const UnitId unit = table.chunk(id).unit;
  const auto read = [&](std::uint64_t step, std::span<const std::byte> from, std::uint64_t first,
                        std::span<const DecayRun> decay_runs, TypedSpan<std::byte> to) {
    ParamRounding rounding = context_.rounding;
    rounding.step = table.chunk(id).constant ? 0 : step;
    read_params(table.state_format(id), from, rounding, first, decay_runs, to);
  };
  const std::function<void()> job = [&] {
    const std::uint64_t first = table.first_element(id);
    if (!table.is_packed(unit)) {
      const ParamId lent = table.model().units[unit].params.front().lent.value_or(0);
      return read(steps.of(lent), record, first, table.decay_runs(id), param);
    }
    const std::size_t element_bytes = holds_param(table.state_format(id)) ? 2 : sizeof(float);
    for (const ParamRun& run : runs) {
      DecayRun alone =
          *std::ranges::upper_bound(table.decay_runs(id), run.begin, {}, &DecayRun::end);
      alone.begin = 0;
      alone.end = run.count;
      read(steps.of(run.lent), record.subspan(run.begin * element_bytes), first + run.begin,
           std::span(&alone, 1), param.subspan(run.begin, run.count));
    }
  };
  {
    const LentMemory::Use its(context_.lent);
    const Work work{.name = "round params",
                    .bytes = record.size() + param.bytes.size(),
                    .read = record,
                    .written = param.bytes};
    co_await context_.run_near(id, work, job);
  }
  co_await publish(id, param, runs);
}

Task<UnitParamHome::Loading> UnitParamHome::load(UnitId unit, std::byte* destination, Need need,
                                                 IoPriority priority) {
  Fetched fetched = co_await fetch(unit, need, priority);
  Loading loading;
  loading.staging = std::move(fetched.lease);
  const Stream::Copy request =
      this->loading(unit, destination, fetched.bytes.data(), Stream::Direction::kToDevice);
  loading.landed = context_.to_device->copy(request, [](const std::exception_ptr&) {});
  co_return loading;
}

TypedSpan<std::byte> UnitParamHome::in_unit(ChunkId id, std::byte* unit) const noexcept {
  const Chunk& chunk = context_.table.chunk(id);
  const DType dtype = context_.table.dtype(chunk.unit);
  const std::uint64_t at = chunk.begin - context_.table.home_begin(chunk.unit);
  return {dtype, {unit + at * size_bytes(dtype), chunk.param_bytes()}};
}

Stream::Copy UnitParamHome::loading(UnitId unit, std::byte* destination, const std::byte* source,
                                    Stream::Direction direction) const noexcept {
  const std::uint64_t begin = context_.table.home_begin(unit) * context_.table.element_bytes(unit);
  return {.destination = destination + begin,
          .source = source,
          .size_bytes = home_bytes(unit),
          .direction = direction};
}

Task<Lease> UnitParamHome::lease(std::uint64_t size_bytes, Need need, const char* holder) {
  const LeaseRequest request{
      .purpose = Purpose::kParams, .size_bytes = size_bytes, .need = need, .holder = holder};
  co_return co_await context_.pool.acquire(request);
}

/// Copies what was written to its places in `part`.
Task<> UnitParamHome::copy_written(std::span<const Written> written, std::span<std::byte> part) {
  for (const Written& its : written)
    co_await context_.copy_to_host(part.subspan(its.at_bytes, its.from.size()), its.from);
}

Task<> UnitParamHome::gather_in(UnitId unit, std::span<std::byte> whole) {
  const std::size_t element_bytes = context_.table.element_bytes(unit);
  co_await context_.ranks.params->all_gather(
      whole.subspan(context_.table.own_begin(unit) * element_bytes,
                    context_.table.unit(unit).slice_count * element_bytes),
      whole);
}

}  // namespace ziggurat
