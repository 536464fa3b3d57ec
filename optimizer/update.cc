// SPDX-License-Identifier: Apache-2.0
// optimizer/update.cc: cuts a record into tiles, which are hashed while they are in cache, and
// tiles into decay runs.
#include "optimizer/update.h"

#include <hwy/cache_control.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "base/check.h"
#include "base/checksum.h"
#include "base/numerics/typed_value.h"
#include "optimizer/eight_bit.h"
#include "optimizer/kernels.h"
#include "optimizer/record_slice.h"
#include "tiers/store/record_hash.h"

namespace ziggurat {
namespace {

using internal::elements_of;
using internal::moment_code;
using internal::Runs;
using internal::Slice;
using internal::tiles_of;

/// The last tile, if the trainer's elements end before the record's. It is padded for the step, and
/// cut again afterwards.
class PaddedTile {
 public:
  /// Copies the elements of the view from `first` on.
  PaddedTile(const RecordView& view, std::size_t first) : param_(rest(view.param, first)) {
    const std::size_t stepped = internal::stepped_of(view) - first;
    fill(grad_values_, rest(view.grad, first).bytes, stepped * size_bytes(view.grad.dtype));
    fill(param_values_, param_.bytes, stepped * size_bytes(view.param.dtype));
  }
  const std::byte* grad() const { return grad_values_.data(); }
  std::byte* param() { return param_.bytes.empty() ? nullptr : param_values_.data(); }
  void store_param() const {
    if (!param_.bytes.empty())
      std::memcpy(param_.bytes.data(), param_values_.data(), param_.bytes.size());
  }

 private:
  template <class Byte>
  static TypedSpan<Byte> rest(const TypedSpan<Byte>& of, std::size_t first) {
    return of.bytes.empty() ? of : of.subspan(first, of.count() - first);
  }
  static void fill(std::span<std::byte> to, std::span<const std::byte> values, std::size_t end) {
    if (values.empty()) return;
    std::memcpy(to.data(), values.data(), values.size());
    std::memset(to.data() + values.size(), 0, end - values.size());
  }

  using Values = std::array<std::byte, kTileElements * sizeof(float)>;
  TypedSpan<std::byte> param_;
  alignas(internal::kStreamAlignment) Values grad_values_;
  alignas(internal::kStreamAlignment) Values param_values_;
};

bool rounds_with_noise(const OptimizerStep& step, StateFormat format) {
  const Drawn drawn = drawn_by(format, step.rounding);
  return drawn.param || drawn.moments;
}

/// Updates a record's tiles, one after the other.
class Pass {
 public:
  Pass(StepView steps, const RecordView& view, const RecordFormat& format,
       std::span<const DecayRun> runs)
      : kind_(steps[0].kind),
        rounding_key_(steps[0].rounding_key),
        view_(view),
        format_(format),
        record_(internal::slice_of(kind_, view, format)),
        all_runs_(runs),
        runs_(steps, runs, /*one_key=*/rounds_with_noise(steps[0], view.format)),
        moments_(moment_count(kind_)),
        tiles_(tiles_of(elements_of(view))),
        stepped_(internal::stepped_of(view)) {
    const std::size_t whole = elements_of(view) / kTileElements;
    if (whole < tiles_) padded_.emplace(view, whole * kTileElements);
  }

  UpdateHashes run(const UpdateHashing* hashing) {
    std::optional<RecordHash> before, after;
    if (hashing != nullptr) after.emplace(format_, view_.record.size());
    if (hashing != nullptr && hashing->verify) before.emplace(format_, view_.record.size());
    for (std::size_t tile = 0; tile < tiles_; ++tile) {
      fill_master(tile);
      if (after) {
        update_hashed(tile, before, *after);
      } else {
        take_masters(tile);
        update(tile);
      }
    }
    hwy::FlushStream();  // parameters may have been stored past the cache
    if (padded_ && has_gradient()) padded_->store_param();
    return {.before = before ? before->finish(hashing->seed_before) : 0,
            .after = after ? after->finish(hashing->seed_after) : 0};
  }

 private:
  std::byte* segment(std::size_t index, std::size_t tile) const {
    const std::uint64_t tile_bytes = format_.segments()[index].tile_bytes;
    return view_.record.data() + format_.offset(index, tiles_) + tile * tile_bytes;
  }

  bool is_padded(std::size_t tile) const { return padded_ && tile + 1 == tiles_; }

  /// Returns how many elements of the tile are stepped.
  std::size_t stepped(std::size_t tile) const {
    return std::min(kTileElements, stepped_ - tile * kTileElements);
  }

  const std::byte* tile_grad(std::size_t tile) const {
    if (!has_gradient()) return nullptr;
    if (is_padded(tile)) return padded_->grad();
    return view_.grad.bytes.data() + tile * kTileElements * size_bytes(view_.grad.dtype);
  }

  std::byte* tile_param(std::size_t tile) {
    if (is_padded(tile)) return padded_->param();
    if (view_.param.bytes.empty()) return nullptr;
    return view_.param.bytes.data() + tile * kTileElements * size_bytes(view_.param.dtype);
  }

  /// Copies the fp32 parameter into a master that was not read. A bf16 parameter is read where it
  /// is.
  void fill_master(std::size_t tile) {
    if (!view_.param_not_read || holds_param(view_.format)) return;
    std::memcpy(segment(0, tile), tile_param(tile), format_.segments()[0].tile_bytes);
  }

  /// Takes masters from parameters that a trainer has written.
  void take_masters(std::size_t tile) {
    if (!view_.masters_from_param) return;
    const std::size_t first = tile * kTileElements;
    const std::size_t count = stepped(tile);
    auto run = std::ranges::upper_bound(all_runs_, first, {}, &DecayRun::end);
    for (; run != all_runs_.end() && run->begin < first + count; ++run) {
      if (run->keeps_masters) continue;
      take_masters(tile, std::max(run->begin, first) - first, std::min(run->end - first, count));
    }
    for (std::size_t index = 0; index < master_segments(); ++index)
      clear(index, tile, count, kTileElements);
  }

  /// Takes the masters of elements [begin, end) of a tile.
  void take_masters(std::size_t tile, std::size_t begin, std::size_t end) {
    const std::byte* const param = tile_param(tile);
    if (holds_param(view_.format)) {
      std::memcpy(segment(0, tile) + begin * sizeof(bf16), param + begin * sizeof(bf16),
                  (end - begin) * sizeof(bf16));
      // A bf16 value is a master whose lower half is zero.
      if (has_residual(view_.format)) clear(1, tile, begin, end);
    } else {
      auto* const masters = reinterpret_cast<float*>(segment(0, tile));
      for (std::size_t i = begin; i < end; ++i) masters[i] = value_at(view_.param.dtype, param, i);
    }
  }

  Slice tile_slice(std::size_t tile) {
    const std::size_t begin = tile * kTileElements;
    Slice slice = internal::part_of(record_, begin, begin + kTileElements);
    slice.grad = tile_grad(tile);
    slice.param = tile_param(tile);
    if (slice.param_in != slice.param_record)
      slice.param_in = reinterpret_cast<const bf16*>(slice.param);
    slice.noise_key = tile_noise(rounding_key_, view_.first_element / kTileElements + tile);
    slice.noise_index = 0;
    return slice;
  }

  static void update_part(const Slice& tile, std::size_t first, const Runs::Part& run) {
    Slice part = internal::part_of(tile, run.begin - first, run.end - first);
    part.decay = run.decay;
    if (run.place) {
      const std::uint64_t element = run.place->whole(0);
      part.noise_key = param_noise(param_key(run.step.rounding_key, run.place->name), element);
      part.noise_index = static_cast<std::uint32_t>(element);
    }
    internal::update(run.step, part);
  }

  static void update_run(const Slice& tile, std::size_t first, const Runs::Part& run) {
    if (!run.skipped) update_part(tile, first, run);
  }

  bool has_gradient() const { return !view_.grad.bytes.empty(); }

  void update(std::size_t tile) {
    if (!has_gradient()) return;
    const Slice slice = tile_slice(tile);
    const std::size_t first = tile * kTileElements;
    const std::size_t end = first + stepped(tile);
    if (has_codes(view_.format)) {
      update_blocks(slice, first, end);
    } else {
      while (runs_.at() < end) update_run(slice, first, runs_.next(end));
    }
    if (is_padded(tile)) clear_padding(tile);
  }

  /// Clears the masters of elements that the trainer does not have. A step makes NaN of them if eps
  /// is 0, and -0 if decay is negative, while a parameter that is read instead has zeros there.
  void clear_padding(std::size_t tile) const {
    const std::size_t real = elements_of(view_) % kTileElements;
    for (std::size_t index = 0; index < master_segments(); ++index)
      clear(index, tile, real, stepped(tile));
  }

  std::size_t master_segments() const { return has_residual(view_.format) ? 2 : 1; }

  /// Clears elements [begin, end) of the tile's part of a segment of whole elements.
  void clear(std::size_t index, std::size_t tile, std::size_t begin, std::size_t end) const {
    const std::size_t each = format_.segments()[index].tile_bytes / kTileElements;
    std::memset(segment(index, tile) + begin * each, 0, (end - begin) * each);
  }

  /// Updates moments in codes. Whole blocks of one run go through a kernel; a block that contains
  /// the end of a run, or is one of a shared record, is updated as a whole in fp32.
  void update_blocks(const Slice& tile, std::size_t first, std::size_t stop) {
    while (runs_.at() < stop) {
      const std::size_t begin = runs_.at();
      Runs ahead = runs_;
      const Runs::Part run = ahead.next(stop);
      const std::size_t whole = (run.end - begin) / kEightBitBlock * kEightBitBlock;
      if (view_.own_blocks) {
        update_block(tile, first, std::min({begin + kEightBitBlock, runs_.run_end(), stop}));
      } else if (whole != 0) {
        update_run(tile, first, runs_.next(begin + whole));
      } else {
        update_block(tile, first, begin + kEightBitBlock);
      }
    }
  }

  /// Updates the block from the runs' current position to `end`, unless none of it is stepped.
  void update_block(const Slice& tile, std::size_t first, std::size_t end) {
    const std::size_t begin = runs_.at();
    bool skipped = true;
    for (Runs ahead = runs_; ahead.at() < end;) skipped = ahead.next(end).skipped && skipped;
    if (skipped) {
      while (runs_.at() < end) runs_.next(end);
      return;
    }
    alignas(64) std::array<std::array<float, kEightBitBlock>, kMomentsMax> values;
    const std::size_t step = scale_step(view_.own_blocks);
    ZIGGURAT_CHECK(begin % step == 0 && end - begin <= kEightBitBlock,
                   "elements [{}, {}) are no block", begin, end);
    const Slice codes = internal::part_of(tile, begin - first, end - first);
    Slice block = codes;
    block.format = decoded(codes.format);
    const auto codes_of = [&](std::size_t k) {
      return std::span(reinterpret_cast<std::uint8_t*>(codes.moments[k]), end - begin);
    };
    for (std::size_t k = 0; k < moments_; ++k) {
      const float* const scale = record_.scales[k] + begin / step;
      decode_eight_bit(moment_code(kind_, k), codes_of(k), scale, values[k].data());
      block.moments[k] = reinterpret_cast<std::byte*>(values[k].data());
    }
    while (runs_.at() < end) update_run(block, begin, runs_.next(end));
    for (std::size_t k = 0; k < moments_; ++k) {
      float* const scale = record_.scales[k] + begin / step;
      encode_eight_bit(moment_code(kind_, k), values[k].data(), codes_of(k), scale);
    }
  }

  void update_hashed(std::size_t tile, std::optional<RecordHash>& before, RecordHash& after) {
    const std::size_t end = (tile + 1) * kTileElements;
    Runs ahead = runs_;
    const Runs::Part whole = ahead.next(end);
    Slice slice = tile_slice(tile);
    slice.decay = whole.decay;
    const bool usual = has_gradient() && !view_.masters_from_param && !is_padded(tile);
    if (usual && whole.end == end && !whole.skipped &&
        internal::can_hash_adamw(whole.step, slice)) {
      internal::TileHashes hashes;
      internal::adamw_hashed(whole.step, slice, before.has_value(), hashes);
      for (std::size_t array = 0; array < std::size(hashes.after); ++array) {
        if (before) before->set_piece(array, tile, hashes.before[array]);
        after.set_piece(array, tile, hashes.after[array]);
      }
      runs_ = ahead;
      return;
    }
    const bool elsewhere = view_.param_not_read && holds_param(view_.format);
    if (before) hash_tile(tile, *before, elsewhere ? slice.param : nullptr);
    take_masters(tile);
    update(tile);
    hash_tile(tile, after, nullptr);
  }

  /// Hashes a tile. `param` is where the first segment's bytes are, if they are not in the record.
  void hash_tile(std::size_t tile, RecordHash& hash, const std::byte* param) const {
    for (std::size_t index = 0; index < format_.segments().size(); ++index) {
      const std::byte* const bytes = index == 0 && param != nullptr ? param : segment(index, tile);
      hash.set_piece(index, tile, hash64({bytes, format_.segments()[index].tile_bytes}, 0));
    }
  }

  OptimizerKind kind_;
  std::uint64_t rounding_key_;
  const RecordView& view_;
  const RecordFormat& format_;
  Slice record_;
  std::span<const DecayRun> all_runs_;
  Runs runs_;
  std::size_t moments_;
  std::size_t tiles_;
  std::size_t stepped_;
  std::optional<PaddedTile> padded_;  ///< set if the trainer's elements end before the record's
};

}  // namespace

void internal::update(const OptimizerStep& step, const Slice& slice) {
  has_codes(slice.format) ? update_codes(step, slice) : update_elements(step, slice);
}

UpdateHashes update_record(StepView steps, const RecordView& view, std::span<const DecayRun> runs,
                           const UpdateHashing* hashing) {
  const RecordFormat format = record_format({steps[0].kind, view.format, view.own_blocks});
  internal::check_update(steps, view, format, runs);
  return Pass(steps, view, format, runs).run(hashing);
}

}  // namespace ziggurat
