// SPDX-License-Identifier: Apache-2.0
// aio/faulty_engine.cc: holds, drops or alters the transfers that a fault strikes.
#include "aio/faulty_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/error.h"

namespace ziggurat {
namespace {

// The size of a direct write must stay a multiple of this to be accepted by every engine inside.
constexpr std::uint32_t kSafeAlignmentBytes = 4096;

FaultPoint point_of(IoKind kind) noexcept {
  switch (kind) {
    case IoKind::kRead: return FaultPoint::kRead;
    case IoKind::kWrite: return FaultPoint::kWrite;
    case IoKind::kSync: break;
  }
  return FaultPoint::kSync;
}

bool fits(const Fault& fault) noexcept {
  switch (fault.effect) {
    case Fault::Effect::kErrno: return fault.error_number > 0;
    case Fault::Effect::kShort:
    case Fault::Effect::kZero:
      return fault.point == FaultPoint::kRead || fault.point == FaultPoint::kWrite;
    case Fault::Effect::kMisdirect: return fault.point == FaultPoint::kWrite;
    case Fault::Effect::kDelay: return fault.point <= FaultPoint::kSync;
  }
  return false;
}

}  // namespace

Fault Fault::fail(FaultPoint point, int error_number) {
  return {.point = point, .effect = Effect::kErrno, .error_number = error_number};
}

Fault Fault::shorten(FaultPoint point, std::uint32_t by_bytes) {
  return {.point = point, .effect = Effect::kShort, .short_bytes = by_bytes};
}

Fault Fault::zero(FaultPoint point) { return {.point = point, .effect = Effect::kZero}; }

Fault Fault::misdirect(std::int64_t by_bytes) {
  return {.point = FaultPoint::kWrite, .effect = Effect::kMisdirect, .misdirect_bytes = by_bytes};
}

Fault Fault::slow(FaultPoint point, Nanoseconds delay) {
  return {.point = point, .effect = Effect::kDelay, .delay = delay};
}

Fault Fault::at(std::uint64_t call) const {
  Fault moved = *this;
  moved.position = call;
  return moved;
}

Fault Fault::from_then_on() const {
  Fault lasting = *this;
  lasting.persistent = true;
  return lasting;
}

Fault Fault::within(const std::string& path_, std::uint64_t offset_bytes,
                    std::uint64_t size_bytes) const {
  Fault placed = from_then_on();
  placed.path = path_;
  placed.begin_bytes = offset_bytes;
  placed.end_bytes = offset_bytes + size_bytes;
  return placed;
}

// Transfers that this engine has taken and not yet given to the engine inside. Timers share it, and
// they may outlive the engine.
struct FaultyEngine::Held {
  std::vector<IoOp*> ops;
  FaultyEngine* engine;
};

// A transfer that the engine inside gets in another form than its owner submitted it.
struct FaultyEngine::Altered {
  IoOp op;
  IoOp* original;
  std::uint32_t report_max;  // the most bytes that the owner is told of
};

FaultyEngine::FaultyEngine(Reactor& reactor, std::unique_ptr<IoEngine> inside)
    : reactor_(reactor), inside_(std::move(inside)), held_(std::make_shared<Held>()) {
  held_->engine = this;
}

FaultyEngine::~FaultyEngine() {
  while (!held_->ops.empty()) release(*held_->ops.front(), -ECANCELED, false);
  held_->engine = nullptr;
}

void FaultyEngine::plan(const Fault& fault) {
  ZIGGURAT_CHECK(fits(fault), "effect {} at point {}", static_cast<int>(fault.effect),
                 static_cast<int>(fault.point));
  plan_.push_back(fault);
}

bool FaultyEngine::touches(const Fault& fault, const IoOp* op) const {
  if (fault.path.empty()) return true;
  return op != nullptr && path_of(op->file) == fault.path && op->offset_bytes < fault.end_bytes &&
         fault.begin_bytes < op->offset_bytes + op->size_bytes;
}

const Fault* FaultyEngine::strike(FaultPoint point, const IoOp* op) {
  const std::uint64_t call = calls_[static_cast<std::size_t>(point)]++;
  const auto fault = std::find_if(plan_.begin(), plan_.end(), [&](const Fault& each) {
    return each.point == point && each.times > 0 &&
           (each.persistent ? call >= each.position : call == each.position) && touches(each, op);
  });
  if (fault == plan_.end()) return ask_gate(point);
  ++injected_[static_cast<std::size_t>(point)];
  --fault->times;
  return &*fault;
}

const Fault* FaultyEngine::ask_gate(FaultPoint point) {
  const int error = gate_ ? gate_(point) : 0;
  if (error == 0) return nullptr;
  ++injected_[static_cast<std::size_t>(point)];
  gated_ = Fault::fail(point, error);
  return &gated_;
}

void FaultyEngine::strike_name(FaultPoint point, const std::string& what) {
  if (const Fault* const fault = strike(point))
    throw system_error(fault->error_number, what + " (injected)");
}

std::string FaultyEngine::description() const {
  return inside_->description() + ", with planned faults";
}

FileHandle FaultyEngine::open(const std::string& path, const OpenOptions& options) {
  strike_name(FaultPoint::kOpen, "open " + path);
  const FileHandle file = inside_->open(path, options);
  const auto id = static_cast<std::size_t>(file.id);
  if (id >= paths_.size()) paths_.resize(id + 1);
  paths_[id] = path;
  return file;
}

const std::string& FaultyEngine::path_of(FileHandle file) const {
  static const std::string kNone = "a file that is not open";
  const auto id = static_cast<std::size_t>(file.id);
  return file.id >= 0 && id < paths_.size() ? paths_[id] : kNone;
}

std::uint64_t FaultyEngine::file_size_bytes(FileHandle file) {
  strike_name(FaultPoint::kFileSize, "size of " + path_of(file));
  return inside_->file_size_bytes(file);
}

void FaultyEngine::allocate(FileHandle file, std::uint64_t size_bytes) {
  strike_name(FaultPoint::kAllocate,
              fmt::format("allocate {} bytes for {}", size_bytes, path_of(file)));
  inside_->allocate(file, size_bytes);
}

DirectAlignment FaultyEngine::alignment(FileHandle file) {
  strike_name(FaultPoint::kAlignment, "alignment of " + path_of(file));
  return inside_->alignment(file);
}

void FaultyEngine::rename(const std::string& from, const std::string& to) {
  strike_name(FaultPoint::kRename, fmt::format("rename {} to {}", from, to));
  inside_->rename(from, to);
}

void FaultyEngine::remove(const std::string& path) {
  strike_name(FaultPoint::kRemove, "remove " + path);
  inside_->remove(path);
}

bool FaultyEngine::exists(const std::string& path) {
  strike_name(FaultPoint::kExists, "look for " + path);
  return inside_->exists(path);
}

void FaultyEngine::sync_directory(const std::string& path) {
  strike_name(FaultPoint::kSyncDirectory, "fsync of directory " + path);
  inside_->sync_directory(path);
}

void FaultyEngine::make_directory(const std::string& path) {
  strike_name(FaultPoint::kMakeDirectory, "make directory " + path);
  inside_->make_directory(path);
}

void FaultyEngine::remove_directory(const std::string& path) {
  strike_name(FaultPoint::kRemoveDirectory, "remove directory " + path);
  inside_->remove_directory(path);
}

std::vector<std::string> FaultyEngine::names_in(const std::string& directory) {
  strike_name(FaultPoint::kNamesIn, "list directory " + directory);
  return inside_->names_in(directory);
}

std::size_t FaultyEngine::in_flight() const noexcept {
  return inside_->in_flight() + held_->ops.size();
}

void FaultyEngine::submit(IoOp& op) {
  const Fault* const fault = strike(point_of(op.kind), &op);
  if (fault == nullptr) return inside_->submit(op);
  switch (fault->effect) {
    case Fault::Effect::kErrno: return hold(op, -fault->error_number, false, Nanoseconds{0});
    case Fault::Effect::kZero: return hold(op, 0, false, Nanoseconds{0});
    case Fault::Effect::kDelay: return hold(op, 0, true, fault->delay);
    case Fault::Effect::kShort:
      if (fault->short_bytes >= op.size_bytes) return hold(op, 0, false, Nanoseconds{0});
      return submit_altered(op, *fault);
    case Fault::Effect::kMisdirect: return submit_altered(op, *fault);
  }
}

void FaultyEngine::hold(IoOp& op, std::int32_t result, bool carry_out, Nanoseconds delay) {
  held_->ops.push_back(&op);
  auto let_go = [held = held_, &op, result, carry_out] {
    if (held->engine != nullptr) held->engine->release(op, result, carry_out);
  };
  if (delay > Nanoseconds{0}) {
    reactor_.clock().after(delay, std::move(let_go));
  } else {
    reactor_.post(std::move(let_go));
  }
}

void FaultyEngine::release(IoOp& op, std::int32_t result, bool carry_out) {
  held_->ops.erase(std::find(held_->ops.begin(), held_->ops.end(), &op));
  if (carry_out) {
    inside_->submit(op);
  } else {
    op.complete(op, result);
  }
}

void FaultyEngine::submit_altered(IoOp& op, const Fault& fault) {
  auto altered = std::make_unique<Altered>(Altered{op, &op, op.size_bytes});
  if (fault.effect == Fault::Effect::kMisdirect) {
    altered->op.offset_bytes = static_cast<std::uint64_t>(
        static_cast<std::int64_t>(op.offset_bytes) + fault.misdirect_bytes);
  } else {
    // The size is rounded up, so that more bytes may have moved than are reported, but never fewer.
    altered->report_max = op.size_bytes - fault.short_bytes;
    const std::uint64_t moved = round_up(altered->report_max, kSafeAlignmentBytes);
    altered->op.size_bytes =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(moved, op.size_bytes));
  }
  altered->op.user = altered.get();
  altered->op.complete = [](IoOp& inner, std::int32_t result) {
    const std::unique_ptr<Altered> mine(static_cast<Altered*>(inner.user));
    IoOp& original = *mine->original;
    const auto most = static_cast<std::int32_t>(mine->report_max);
    original.complete(original, std::min(result, most));
  };
  inside_->submit(altered.release()->op);
}

}  // namespace ziggurat
