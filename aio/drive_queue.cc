// SPDX-License-Identifier: Apache-2.0
// aio/drive_queue.cc: chooses among eight lists, and accounts for what is outstanding.
#include "aio/drive_queue.h"

#include <fmt/format.h>

#include <cerrno>
#include <utility>

#include "base/check.h"

namespace ziggurat {

// A copy of an operation for the engine inside, so that its completion comes to DriveQueue first.
struct DriveQueue::Given {
  IoOp op;
  IoOp* original;
  DriveQueue* queue;
};

DriveQueue::DriveQueue(Reactor& reactor, std::unique_ptr<IoEngine> inside,
                       DriveQueueOptions options)
    : reactor_(reactor), options_(options), inside_(std::move(inside)) {
  ZIGGURAT_CHECK(options_.outstanding_bytes_max > 0, "a drive that is given nothing");
}

DriveQueue::~DriveQueue() {
  stopping_ = true;
  for (Class& each : classes_) {
    for (OpQueue& ops : each.direction) {
      while (IoOp* const op = ops.pop()) {
        --waiting_;
        op->complete(*op, -ECANCELED);
      }
    }
  }
}

std::string DriveQueue::description() const {
  return fmt::format("{}, at most {} at the drive", inside_->description(),
                     format_bytes(options_.outstanding_bytes_max));
}

FileHandle DriveQueue::open(const std::string& path, const OpenOptions& options) {
  return inside_->open(path, options);
}

std::uint64_t DriveQueue::file_size_bytes(FileHandle file) {
  return inside_->file_size_bytes(file);
}

void DriveQueue::allocate(FileHandle file, std::uint64_t size_bytes) {
  inside_->allocate(file, size_bytes);
}

void DriveQueue::rename(const std::string& from, const std::string& to) {
  inside_->rename(from, to);
}

void DriveQueue::submit(IoOp& op) {
  // While the queue is being destroyed it orders nothing: the engine inside cancels the operation.
  if (stopping_) return inside_->submit(op);
  ZIGGURAT_CHECK(reactor_.on_reactor_thread(), "submit() outside the reactor's thread");
  if (op.kind == IoKind::kSync) return give(op);
  class_of(op.priority).direction[static_cast<std::size_t>(op.kind)].push(op);
  ++waiting_;
  give_all_that_fit();
}

void DriveQueue::raise(std::span<const std::byte> memory, IoPriority priority) {
  const auto touches = [&](const IoOp& op) {
    return op.data < memory.data() + memory.size() && memory.data() < op.data + op.size_bytes;
  };
  Class& to = class_of(priority);
  for (auto lower = static_cast<std::size_t>(priority) + 1; lower < kIoPriorities; ++lower) {
    for (std::size_t direction = 0; direction < 2; ++direction) {
      OpQueue kept;
      OpQueue& from = classes_[lower].direction[direction];
      while (IoOp* const op = from.pop()) {
        if (touches(*op)) op->priority = priority;  // kept for its owner's retries
        (touches(*op) ? to.direction[direction] : kept).push(*op);
      }
      from = kept;
    }
    if (classes_[lower].empty()) classes_[lower].overtaken_bytes = 0;
  }
}

std::size_t DriveQueue::next_class() const noexcept {
  std::size_t first = kIoPriorities;
  for (std::size_t i = 0; i < kIoPriorities; ++i) {
    if (classes_[i].empty()) continue;
    if (classes_[i].overtaken_bytes >= options_.overtaken_bytes_max) return i;
    if (first == kIoPriorities) first = i;
  }
  return first;
}

std::size_t DriveQueue::next_direction(const Class& from) noexcept {
  if (from.direction[0].empty()) return 1;
  if (from.direction[1].empty()) return 0;
  return from.read_lead_bytes > 0 ? 1 : 0;
}

void DriveQueue::give_all_that_fit() {
  while (waiting_ > 0 && !stopping_ && outstanding_ < inside_->queue_depth()) {
    const std::size_t chosen = next_class();
    Class& from = classes_[chosen];
    const std::size_t direction = next_direction(from);
    const std::uint32_t size_bytes = from.direction[direction].front()->size_bytes;
    // A smaller operation must not go first: a large one could then wait for ever.
    const bool fits = outstanding_bytes_ + size_bytes <= options_.outstanding_bytes_max;
    if (!fits && outstanding_bytes_ > 0) return;
    account(chosen, direction, size_bytes);
    --waiting_;
    give(*from.direction[direction].pop());
  }
}

/// Updates the counters of fairness. Called before the operation leaves its list.
void DriveQueue::account(std::size_t chosen, std::size_t direction, std::uint32_t size_bytes) {
  Class& from = classes_[chosen];
  const bool both_wait = !from.direction[0].empty() && !from.direction[1].empty();
  const std::int64_t lead = direction == 0 ? size_bytes : -std::int64_t{size_bytes};
  // If one direction is alone, the other is owed nothing when it comes.
  from.read_lead_bytes = both_wait ? from.read_lead_bytes + lead : 0;
  from.overtaken_bytes = 0;
  for (std::size_t lower = chosen + 1; lower < kIoPriorities; ++lower) {
    if (!classes_[lower].empty()) classes_[lower].overtaken_bytes += size_bytes;
  }
}

void DriveQueue::give(IoOp& op) {
  if (spare_.empty()) {
    spare_.push_back(all_given_.emplace_back(std::make_unique<Given>()).get());
  }
  Given& given = *spare_.back();
  spare_.pop_back();
  given = {op, &op, this};
  given.op.user = &given;
  given.op.complete = [](IoOp& inner, std::int32_t result) {
    Given& mine = *static_cast<Given*>(inner.user);
    mine.queue->take_back(mine, result);
  };
  ++outstanding_;
  outstanding_bytes_ += op.size_bytes;
  inside_->submit(given.op);
}

void DriveQueue::take_back(Given& given, std::int32_t result) {
  IoOp& original = *given.original;
  --outstanding_;
  outstanding_bytes_ -= given.op.size_bytes;
  spare_.push_back(&given);
  original.complete(original, result);
  give_all_that_fit();
}

}  // namespace ziggurat
