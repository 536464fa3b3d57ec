// SPDX-License-Identifier: Apache-2.0
// core/engine/state/piece_copy.h: copies the state of parameters that a trainer lends, with what
// the trainer has written since the step. Private to core/engine. Reactor's thread.
#pragma once

#include <map>
#include <memory>
#include <optional>

#include "core/engine/state/record_copier.h"
#include "core/engine/state_copy.h"
#include "core/schedule/optimizer/state_writes.h"

namespace ziggurat {

/// Returns the format of the arrays that are copied (CopyOptions::widen_codes).
inline StateKind copied_kind(StateKind kept, bool widen_codes) {
  const bool widens = widen_codes && has_codes(kept.format);
  return widens ? StateKind{kept.optimizer, decoded(kept.format)} : kept;
}

class PieceCopy final : public StateCopy {
 public:
  struct Parts {
    Context& context;
    RecordCopier& copier;
    WorkGroup& tasks;  ///< the copy goes on as one of these
  };
  /// What was written between the step and the copy, chunk by chunk.
  using Written = std::map<ChunkId, std::shared_ptr<const StateWrites::Arrays>>;

  /// Begins to copy `generation`, whose records are the store's `stored`.
  PieceCopy(const Parts& parts, std::uint64_t generation, std::uint64_t stored, Written written,
            const CopyOptions& options);

  Task<> run(Take take, Lead lead) override;
  void give_up(std::exception_ptr why) override;
  void end() override;
  bool waits_for_time() const noexcept override {
    return parts_ && parts_->copier.waits_for_time();
  }

  bool has_ended() const noexcept { return !parts_; }
  /// Called when the engine closes and `tasks` are idle.
  void engine_closed();

 private:
  using TakePtr = std::shared_ptr<const Take>;
  /// An array of a part of a parameter.
  struct Part {
    ParamRun run;
    std::size_t array;
  };
  Task<> copy(TakePtr take, const Lead& lead, Signal& ended);
  Task<> save(ChunkId chunk, std::span<std::byte> record, TakePtr take, const Lead& lead);
  Task<> save_part(ChunkId chunk, const Part& part, std::span<const std::byte> record, TakePtr take,
                   const Lead& lead);
  static Task<> give(TakePtr take, ParamId param, std::size_t array, std::uint64_t first,
                     std::shared_ptr<const AlignedBytes> values, std::shared_ptr<Signal> taken);

  std::optional<Parts> parts_;  // none once the copy has ended
  Written written_;
  AlignedPool memory_;  // for arrays on their way to the taker
  bool widens_;
  std::exception_ptr failure_;
};

}  // namespace ziggurat
