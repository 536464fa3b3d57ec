// SPDX-License-Identifier: Apache-2.0
// tests/support/hanging_engine.cc: which calls are not answered, and what becomes of them.
#include "tests/support/hanging_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace ziggurat::test {

void HangingTarget::die_at(Call call, std::uint64_t position) {
  const std::lock_guard lock(mutex_);
  dies_in_ = call;
  dies_at_ = calls_[static_cast<std::size_t>(call)] + position;
}

void HangingTarget::come_back() {
  const std::lock_guard lock(mutex_);
  dies_in_ = Call::kCount;
  dead_ = false;
  back_.notify_all();
  for (HangingEngine* const engine : engines_)
    engine->reactor_.post([engine] { engine->submit_held(); });
}

bool HangingTarget::is_dead() const {
  const std::lock_guard lock(mutex_);
  return dead_;
}

bool HangingTarget::has_died() const {
  const std::lock_guard lock(mutex_);
  return died_;
}

std::uint64_t HangingTarget::calls(Call call) const {
  const std::lock_guard lock(mutex_);
  return calls_[static_cast<std::size_t>(call)];
}

std::uint64_t HangingTarget::on_reactor() const {
  const std::lock_guard lock(mutex_);
  return on_reactor_;
}

std::string HangingTarget::first_on_reactor() const {
  const std::lock_guard lock(mutex_);
  return first_on_reactor_;
}

/// With the mutex.
bool HangingTarget::count(Call call) {
  const std::uint64_t position = calls_[static_cast<std::size_t>(call)]++;
  if (call == dies_in_ && position >= dies_at_) dead_ = died_ = true;
  return dead_;
}

void HangingTarget::name(Call call, const Reactor& reactor, const std::string& what) {
  std::unique_lock lock(mutex_);
  const bool dead = count(call);
  if (reactor.on_reactor_thread()) {
    if (on_reactor_++ == 0) first_on_reactor_ = what;
  } else if (dead) {
    back_.wait(lock, [&] { return !dead_; });
  }
}

HangingEngine::HangingEngine(Reactor& reactor, std::unique_ptr<IoEngine> inside,
                             HangingTarget& target)
    : reactor_(reactor), inside_(std::move(inside)), target_(target) {
  const std::lock_guard lock(target_.mutex_);
  target_.engines_.push_back(this);
}

HangingEngine::~HangingEngine() {
  const std::lock_guard lock(target_.mutex_);
  std::erase(target_.engines_, this);
}

FileHandle HangingEngine::open(const std::string& path, const OpenOptions& options) {
  target_.name(Call::kOpen, reactor_, "open " + path);
  return inside_->open(path, options);
}

void HangingEngine::allocate(FileHandle file, std::uint64_t size_bytes) {
  target_.name(Call::kOther, reactor_, fmt::format("allocate {} bytes", size_bytes));
  inside_->allocate(file, size_bytes);
}

void HangingEngine::rename(const std::string& from, const std::string& to) {
  target_.name(Call::kRename, reactor_, "rename " + from);
  inside_->rename(from, to);
}

void HangingEngine::remove(const std::string& path) {
  target_.name(Call::kOther, reactor_, "remove " + path);
  inside_->remove(path);
}

bool HangingEngine::exists(const std::string& path) {
  target_.name(Call::kOther, reactor_, "look for " + path);
  return inside_->exists(path);
}

void HangingEngine::sync_directory(const std::string& path) {
  target_.name(Call::kSync, reactor_, "sync " + path);
  inside_->sync_directory(path);
}

void HangingEngine::make_directory(const std::string& path) {
  target_.name(Call::kOther, reactor_, "make " + path);
  inside_->make_directory(path);
}

void HangingEngine::remove_directory(const std::string& path) {
  target_.name(Call::kOther, reactor_, "remove " + path);
  inside_->remove_directory(path);
}

std::vector<std::string> HangingEngine::names_in(const std::string& directory) {
  target_.name(Call::kOther, reactor_, "list " + directory);
  return inside_->names_in(directory);
}

void HangingEngine::submit(IoOp& op) {
  {
    const std::lock_guard lock(target_.mutex_);
    const Call call = op.kind == IoKind::kWrite  ? Call::kWrite
                      : op.kind == IoKind::kSync ? Call::kSync
                                                 : Call::kOther;
    if (target_.count(call)) {
      held_.push_back(&op);
      return;
    }
  }
  inside_->submit(op);
}

void HangingEngine::submit_held() {
  for (IoOp* const op : std::exchange(held_, {})) inside_->submit(*op);
}

}  // namespace ziggurat::test
