// SPDX-License-Identifier: Apache-2.0
// optimizer/cuda/update.cc: cuts a record into its runs and queues a kernel for each.
#include "optimizer/cuda/update.h"

#include "base/check.h"
#include "optimizer/cuda/update_programs.h"
#include "optimizer/record_slice.h"
#include "optimizer/state_format.h"

namespace ziggurat::cuda {
namespace {

using internal::part_of;
using internal::Runs;
using internal::Slice;

void require_aligned_arrays(const RecordView& view) {
  require_aligned("record", view.record.data(), sizeof(float));
  require_aligned("gradient", view.grad.bytes.data(), size_bytes(view.grad.dtype));
  require_aligned("parameter", view.param.bytes.data(), size_bytes(view.param.dtype));
}

class Pass {
 public:
  Pass(StreamHandle stream, StepView steps, const RecordView& view, const Slice& record,
       std::span<const DecayRun> runs, std::span<std::byte> scratch)
      : stream_(stream),
        view_(view),
        record_(record),
        real_(internal::elements_of(view)),
        stepped_(internal::stepped_of(view)),
        kind_(steps[0].kind),
        runs_(steps, runs, /*one_key=*/false),
        scratch_(scratch) {}

  void run() {
    // A bf16 parameter need not be copied into the record first, because it is read where it is in
    // use.
    const bool fill = view_.param_not_read && !holds_param(view_.format);
    if (fill || view_.masters_from_param) launch(TakeMasters{record_, real_}, stream_);
    if (view_.grad.bytes.empty()) return;
    while (runs_.at() < stepped_) {
      if (has_codes(view_.format)) {
        next_codes();
      } else {
        const Runs::Part part = runs_.next(stepped_);
        launch(UpdateElements{stretch(record_, 0, part)}, stream_);
      }
    }
  }

 private:
  /// Returns the part of `arrays`, which begin at the record's element `first`.
  Stretch stretch(const Slice& arrays, std::size_t first, const Runs::Part& part) const {
    Stretch stretch{.step = part.step,
                    .slice = part_of(arrays, part.begin - first, part.end - first),
                    .first = view_.first_element + part.begin,
                    .by_param = part.place.has_value(),
                    .place = part.place.value_or(ParamPlace()),
                    .key = part.place ? param_key(part.step.rounding_key, part.place->name) : 0,
                    .real = real_ > part.begin ? real_ - part.begin : 0};
    stretch.slice.decay = part.decay;
    return stretch;
  }

  /// Updates whole blocks of the next run, or the block in which that run begins or ends.
  void next_codes() {
    Runs ahead = runs_;
    const Runs::Part run = ahead.next(stepped_);
    const std::size_t whole = (run.end - run.begin) / kEightBitBlock * kEightBitBlock;
    if (whole != 0) {
      launch(UpdateCodes{stretch(record_, 0, runs_.next(run.begin + whole))}, stream_);
    } else {
      update_shared_block(run.begin);
    }
  }

  void update_shared_block(std::size_t begin) {
    const std::size_t end = begin + kEightBitBlock;
    ZIGGURAT_CHECK(scratch_.size() >= kUpdateScratchBytes, "{} bytes of scratch", scratch_.size());
    require_aligned("scratch", scratch_.data(), sizeof(float));
    auto* const values = reinterpret_cast<float*>(scratch_.data());
    const Slice codes = part_of(record_, begin, end);
    Slice block = codes;
    block.format = decoded(codes.format);
    for (std::size_t k = 0; k < moment_count(kind_); ++k) {
      float* const moment = values + k * kEightBitBlock;
      launch(
          DecodeBlock{internal::moment_code(kind_, k), codes.moments[k], codes.scales[k], moment},
          stream_);
      block.moments[k] = reinterpret_cast<std::byte*>(moment);
    }
    while (runs_.at() < end)
      launch(UpdateElements{stretch(block, begin, runs_.next(end))}, stream_);
    for (std::size_t k = 0; k < moment_count(kind_); ++k) {
      launch(EncodeBlock{internal::moment_code(kind_, k), values + k * kEightBitBlock,
                         codes.moments[k], codes.scales[k]},
             stream_);
    }
  }

  StreamHandle stream_;
  const RecordView& view_;
  const Slice& record_;
  std::size_t real_;
  std::size_t stepped_;
  OptimizerKind kind_;
  Runs runs_;
  std::span<std::byte> scratch_;
};

}  // namespace

void update_record(StreamHandle stream, StepView steps, const RecordView& view,
                   std::span<const DecayRun> runs, std::span<std::byte> scratch) {
  const RecordFormat format = record_format(steps[0].kind, view.format);
  internal::check_update(steps, view, format, runs);
  require_aligned_arrays(view);
  const Slice record = internal::slice_of(steps[0].kind, view, format);
  Pass(stream, steps, view, record, runs, scratch).run();
}

}  // namespace ziggurat::cuda
