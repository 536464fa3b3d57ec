// SPDX-License-Identifier: Apache-2.0
// core/engine/state/state_end.cc: how a state ends: it fails, or it is closed.
#include "base/error.h"
#include "core/engine/state/training_state.h"

namespace ziggurat {
namespace {

bool is_lost_store(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const StoreLost&) {
    return true;
  } catch (...) {
  }
  return false;
}

/// Waits for the tasks of an engine that is closed.
Task<> ended(std::optional<WorkGroup>& tasks) {
  if (!tasks) co_return;
  try {
    co_await tasks->wait_idle();
  } catch (const std::exception&) {
    // The call that the trainer was in has reported the error.
  }
}

}  // namespace

Task<> TrainingState::close() {
  const auto closed =
      std::make_exception_ptr(Error(ErrorCode::kCancelled, "the engine was closed"));
  // After make_durable() the other ranks need nothing more from this rank, and may still be in the
  // last of its exchanges. In every other state they would wait for this rank forever, as in a step
  // that never ends, so they are told.
  if (awaited_by_ranks() && !cancel_.cancelled() && !at_rest_) tell_ranks(closed);
  if (service_) co_await service_->close(begun_);
  closing_ = true;
  // Only now, because the drive may not answer: the other ranks would wait for this one meanwhile.
  if (hand_ != nullptr && !cancel_.cancelled()) co_await hand_->end_loads();
  if (!cancel_.cancelled()) cancel_.cancel(closed);
  ended_ = true;
  co_await ended(tasks_);
  co_await ended(local_tasks_);
  co_await ended(copying_);
  if (copy_) copy_->engine_closed();
  service_.reset();
  saves_.reset();
  sweep_.reset();
  copier_.reset();
  if (hand_ != nullptr) hand_->destroy_parts();
  staging_.reset();
  records_.reset();
  grads_.reset();
  params_.reset();
  to_device_.reset();
  compute_.reset();
  to_host_.reset();
  storage_.reset();  // the ring is destroyed before the memory that is registered with it
  channels_.reset();
  pool_.reset();
}

void TrainingState::close_storage() {
  storage_.reset();
  channels_.reset();
}

/// Whether other ranks wait for this rank: something is under way in which they have a part, or a
/// step was begun in which they will wait. Of pieces nothing is exchanged until a step is made, and
/// then only what makes it durable.
bool TrainingState::awaited_by_ranks() const {
  if (of_pieces() && records_)
    return storing_ || (records_->through_store() && sweep_ && sweep_->step_sealing());
  if ((tasks_ && tasks_->count() > 0) || (sweep_ && sweep_->step_open())) return true;
  return hand_ != nullptr && hand_->in_step();
}

void TrainingState::fail(std::exception_ptr error) {
  if (cancel_.cancelled()) return;
  cancel_.cancel(error);
  ended_ = true;
  // The rank that failed first tells the others why. All ranks know already that a store is lost.
  if (!closing_ && !followed_from_another(error) && !is_lost_store(error)) tell_ranks(error);
}

/// Ends the state with `error`, and tells the other ranks.
void TrainingState::end_by(const std::exception_ptr& error) {
  tell_ranks(error);
  cancel_.cancel(error);
  ended_ = true;
}

}  // namespace ziggurat
