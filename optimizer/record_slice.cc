// SPDX-License-Identifier: Apache-2.0
// optimizer/record_slice.cc: finds where a record's arrays begin.
#include "optimizer/record_slice.h"

#include "base/bytes.h"
#include "base/check.h"
#include "optimizer/eight_bit.h"
#include "optimizer/record_masters.h"

namespace ziggurat {

std::size_t internal::elements_of(const RecordView& view) {
  return view.grad.bytes.empty() ? view.param.count() : view.grad.count();
}

std::size_t internal::stepped_of(const RecordView& view) {
  static_assert(kTileElements % kEightBitBlock == 0);
  return round_up(elements_of(view), view.param_not_read ? kTileElements : kEightBitBlock);
}

void internal::check_update(StepView steps, const RecordView& view, const RecordFormat& format,
                            std::span<const DecayRun> runs) {
  const std::size_t count = elements_of(view);
  ZIGGURAT_CHECK(count > 0 && view.record.size() == format.record_bytes(tiles_of(count)),
                 "{} bytes for a record of {} elements", view.record.size(), count);
  const bool in_record = holds_param(view.format);
  ZIGGURAT_CHECK(view.param.count() == count ||
                     (in_record && view.param.bytes.empty() && !view.param_not_read),
                 "{} parameters for {} elements", view.param.count(), count);
  ZIGGURAT_CHECK(!view.param_not_read || begins_with_param(view.format, view.param.dtype),
                 "a {} parameter is not what a record in {} begins with",
                 to_string(view.param.dtype), to_string(view.format));
  ZIGGURAT_CHECK(!view.masters_from_param || (!view.param_not_read && view.param.count() == count),
                 "masters from {} parameters of {}", view.param.count(), count);
  ZIGGURAT_CHECK(!view.own_blocks || has_codes(view.format), "blocks of codes in a record in {}",
                 to_string(view.format));
  ZIGGURAT_CHECK(!in_record || view.param.dtype == DType::kBFloat16,
                 "a {} parameter beside a record that holds it in bf16",
                 to_string(view.param.dtype));
  ZIGGURAT_CHECK(!has_residual(view.format) || steps[0].rounding.params == Rounding::kNearest,
                 "a split master rounds to nearest");
  std::size_t covered = 0;
  for (const DecayRun& run : runs) {
    ZIGGURAT_CHECK(run.begin == covered && run.end >= run.begin,
                   "run [{}, {}) after a run that ended at {}", run.begin, run.end, covered);
    ZIGGURAT_CHECK(run.group < steps.size(), "a run of group {}, and {} steps", run.group,
                   steps.size());
    covered = run.end;
  }
  ZIGGURAT_CHECK(covered == tiles_of(count) * kTileElements, "runs cover {} of {} elements",
                 covered, count);
}

internal::Slice internal::arrays_of(const StateKind& state, std::span<std::byte> record) {
  return arrays_of(state, record_format(state), record);
}

internal::Slice internal::arrays_of(const StateKind& state, const RecordFormat& format,
                                    std::span<std::byte> record) {
  const std::uint64_t tiles = format.tiles(record.size());
  Slice slice = master_slice(state.format, record, tiles * kTileElements);
  std::size_t index = has_residual(state.format) ? 2 : 1;
  const auto next = [&] { return record.data() + format.offset(index++, tiles); };
  const std::size_t moments = moment_count(state.optimizer);
  for (std::size_t k = 0; k < moments; ++k) slice.moments[k] = next();
  if (has_codes(state.format)) {
    for (std::size_t k = 0; k < moments; ++k) slice.scales[k] = reinterpret_cast<float*>(next());
  }
  return slice;
}

internal::Slice internal::slice_of(OptimizerKind kind, const RecordView& view,
                                   const RecordFormat& format) {
  Slice slice = arrays_of({kind, view.format, view.own_blocks}, format, view.record);
  slice.param_dtype = view.param.dtype;
  slice.param = view.param.bytes.empty() ? nullptr : view.param.bytes.data();
  if (holds_param(view.format) && view.param_not_read)
    slice.param_in = reinterpret_cast<const bf16*>(slice.param);
  slice.grad_dtype = view.grad.dtype;
  slice.grad = view.grad.bytes.empty() ? nullptr : view.grad.bytes.data();
  return slice;
}

}  // namespace ziggurat
