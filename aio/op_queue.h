// SPDX-License-Identifier: Apache-2.0
// aio/op_queue.h: first in, first out, through IoOp::next: waiting costs no memory.
#pragma once

#include <cstddef>

#include "aio/io_engine.h"

namespace ziggurat {

class OpQueue {
 public:
  bool empty() const noexcept { return first_ == nullptr; }
  /// The oldest, the others behind it by IoOp::next; nullptr if there is none.
  IoOp* front() const noexcept { return first_; }

  void push(IoOp& op) noexcept {
    op.next = nullptr;
    (last_ == nullptr ? first_ : last_->next) = &op;
    last_ = &op;
  }

  /// The oldest; nullptr if there is none.
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
