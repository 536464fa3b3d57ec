// SPDX-License-Identifier: Apache-2.0
// aio/op_queue.h: a first-in, first-out queue linked through IoOp::next, so that it needs no memory
// of its own.
#pragma once

#include <cstddef>

#include "aio/io_engine.h"

namespace ziggurat {

class OpQueue {
 public:
  bool empty() const noexcept { return first_ == nullptr; }
  /// Returns the oldest operation; the others follow it by IoOp::next. Null if the queue is empty.
  IoOp* front() const noexcept { return first_; }

  void push(IoOp& op) noexcept {
    op.next = nullptr;
    (last_ == nullptr ? first_ : last_->next) = &op;
    last_ = &op;
  }

  /// Removes and returns the oldest operation; null if the queue is empty.
  IoOp* pop() noexcept {
    IoOp* const op = first_;
    if (op == nullptr) return nullptr;
    first_ = op->next;
    if (first_ == nullptr) last_ = nullptr;
    op->next = nullptr;
    return op;
  }

 private:
  IoOp* first_ = nullptr;
  IoOp* last_ = nullptr;
};

}  // namespace ziggurat
