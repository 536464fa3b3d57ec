// SPDX-License-Identifier: Apache-2.0
// core/engine/state/state_durable.cc: when finished steps become durable.
//
// With records on NVMe the sweep itself makes every step durable. Records in memory are written as
// a generation of the store when make_durable() asks for it, and after every durable_every seconds
// of training. Rank 0 looks at its clock at the end of a step and tells the other ranks in the
// step's message, so that all store the same generation. It is written during the next step's
// forward and backward, which change no record; the next sweep waits for it.
//
// If there is no room on some rank, an error is logged, and the generation is not stored. The next
// attempt is made durable_every seconds later, because a run that goes on with its state in memory
// is better than one that ends. The run ends only if the store can never be written again.
#include <fmt/format.h>

#include <chrono>
#include <string>

#include "base/error.h"
#include "base/log.h"
#include "core/engine/state/training_state.h"

namespace ziggurat {

std::uint64_t TrainingState::durable_generation() const {
  return sweep_ ? sweep_->durable_generation() : 0;
}

Task<> TrainingState::make_durable() {
  cancel_.check();
  const CountedTime waited(runtime_.reactor.clock(), runtime_.metrics, Counter::kWaitDurableNs);
  co_await sweep_->settled();
  co_await hand_->quiesce();
  co_await gates_->wait_all();
  co_await checkpoint_ended();
  if (durable_generation() != generation_) {
    require_all_open("make_durable()");
    {
      const Agreeing now(*this);
      co_await sweep_->checkpoint(generation_, last_blob_);
    }
    stored_at_ = runtime_.reactor.clock().now();
  }
  at_rest_ = !sweep_->step_open();
}

void TrainingState::require_durable() const {
  require_blob_given("make_durable()");
  if (storage_->store) return;
  throw Error(ErrorCode::kInvalidArgument,
              keeps_store() || config_.store.empty()
                  ? "make_durable(): the engine was opened without `store`, so its state cannot be "
                    "made durable"
                  : "make_durable(): every parameter is frozen, so there is nothing to store");
}

/// Whether a checkpoint is due by this rank's clock. Only rank 0's answer is used.
bool TrainingState::checkpoint_due() const {
  if (!storage_->store || records_->through_store() || config_.durable_every_s == 0 || storing_)
    return false;
  const std::chrono::duration<double> since = runtime_.reactor.clock().now() - stored_at_;
  return since.count() >= config_.durable_every_s;
}

/// Begins to write the step that was just made.
void TrainingState::begin_checkpoint() {
  require_all_open("a checkpoint");
  storing_ = true;
  ++begun_.checkpoints;
  stored_.reset();
  Task<> storing = store_checkpoint(generation_, last_blob_);
  context_->spawn(std::move(storing));
}

Task<> TrainingState::store_checkpoint(std::uint64_t generation, std::vector<std::byte> blob) {
  co_await sweep_->settled();
  std::exception_ptr failure;
  try {
    const CountedTime took(runtime_.reactor.clock(), runtime_.metrics, Counter::kCheckpointNs);
    co_await sweep_->checkpoint(generation, blob);
    runtime_.metrics.add(Counter::kCheckpoints, 1);
  } catch (...) {
    failure = std::current_exception();
  }
  if (failure) note_not_stored(generation, failure);
  stored_at_ = runtime_.reactor.clock().now();
  storing_ = false;
  stored_.set();
}

/// Logs that a generation was not stored, if all ranks have failed to write the records and none
/// has sealed them. Rethrows an error that ends the run.
void TrainingState::note_not_stored(std::uint64_t generation,
                                    const std::exception_ptr& failure) const {
  cancel_.check();
  storage_->store->require_writable();
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kResourceExhausted && !followed_from_another(failure)) throw;
    const bool written_over = storage_->store->state().slots == 1;
    log().error(
        "generation {} could not be made durable: {}. Training goes on, and the newest step will "
        "be stored in {:g} s; until then {}",
        generation, error.what(), config_.durable_every_s,
        written_over
            ? std::string("nothing is durable, because the store has one slot")
            : fmt::format("a kill loses all steps after generation {}", durable_generation()));
  }
}

Task<> TrainingState::checkpoint_ended() {
  if (!storing_) co_return;
  co_await stored_.wait();
}

}  // namespace ziggurat
