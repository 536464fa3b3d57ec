// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/nccl_communicator.cc: calls announced over sockets, then made on a thread, in
// order.
#include "collectives/nccl/nccl_communicator.h"

#include <fmt/format.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/runtime/async.h"
#include "base/runtime/work_ended.h"
#include "collectives/checked_communicator.h"

namespace ziggurat {
namespace {

/// What members tell each other of a call before NCCL hears of it.
struct Announcement {
  CallSpec spec;
  NcclGroup::Id id{};  // of the first member, in the first call
};

/// Shared by relatives.
struct Shared {
  std::shared_ptr<ExchangeTransport> transport;
  std::shared_ptr<NcclDevice> device;
  Traffic traffic;        // through NCCL
  Traffic announcements;  // over sockets

  Reactor& reactor() const { return transport->reactor(); }
};

/// A group and the thread that calls it.
class GroupThread {
 public:
  explicit GroupThread(std::unique_ptr<NcclGroup> group) : group_(std::move(group)) {
    thread_ = std::thread([this] { run(); });
  }
  ~GroupThread() {
    group_->abort();
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    woken_.notify_one();
    thread_.join();
  }
  GroupThread(const GroupThread&) = delete;
  GroupThread& operator=(const GroupThread&) = delete;

  void run_next(std::function<void(NcclGroup&)> job) {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    woken_.notify_one();
  }
  void abort() noexcept { group_->abort(); }

 private:
  void run() {
    for (;;) {
      std::function<void(NcclGroup&)> job;
      {
        std::unique_lock lock(mutex_);
        woken_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      job(*group_);
    }
  }

  std::unique_ptr<NcclGroup> group_;
  std::mutex mutex_;
  std::condition_variable woken_;
  std::deque<std::function<void(NcclGroup&)>> jobs_;
  bool stopping_ = false;
  std::thread thread_;
};

/// One communicator's calls, which outlive it while they are under way.
class Calls : public std::enable_shared_from_this<Calls> {
 public:
  using Job = std::function<void(NcclGroup&)>;

  Calls(std::shared_ptr<Shared> shared, std::unique_ptr<ExchangeCommunicator> sockets)
      : shared_(std::move(shared)), sockets_(std::move(sockets)) {}

  ExchangeCommunicator& sockets() noexcept { return *sockets_; }
  Shared& shared() noexcept { return *shared_; }
  void listen() {
    shared_->transport->on_failure([weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->give_up();
    });
  }
  Task<> make(const CallSpec& spec, Job job);
  /// The communicator is gone: nobody may wait for what it left under way.
  void close() {
    if (under_way_ == 0) return;
    shared_->transport->fail(ErrorCode::kCancelled,
                             "a communicator was closed while its calls were under way");
  }

 private:
  struct Call {
    explicit Call(Reactor& reactor) : done(reactor) {}
    CallSpec spec;
    Job job;
    bool announced = false;
    Announcement own;
    std::vector<Announcement> all;
    Signal done;
  };

  static Task<> announce(std::shared_ptr<Calls> self, std::shared_ptr<Call> call, Task<> told);
  static Task<> wait(std::shared_ptr<Call> call) { co_await call->done.wait(); }
  void require_agreement(const Call& call) const;
  void give_up();
  void fail(const std::shared_ptr<Call>& call, std::exception_ptr error);
  void launch_announced();
  void launch(const std::shared_ptr<Call>& call);
  void ended(const std::shared_ptr<Call>& call, const std::optional<Error>& error);

  std::shared_ptr<Shared> shared_;
  std::unique_ptr<ExchangeCommunicator> sockets_;
  std::deque<std::shared_ptr<Call>> queue_;  // not yet launched, in order
  std::unique_ptr<GroupThread> thread_;      // from the first call on
  std::size_t under_way_ = 0;
  bool named_ = false;
};

/// The transport has failed.
void Calls::give_up() {
  const auto failure = std::make_exception_ptr(*shared_->transport->failure());
  for (const auto& call : std::exchange(queue_, {})) fail(call, failure);
  if (thread_) thread_->abort();
}

void Calls::fail(const std::shared_ptr<Call>& call, std::exception_ptr error) {
  if (call->done.is_set()) return;
  --under_way_;
  call->done.fail(std::move(error));
}

Task<> Calls::make(const CallSpec& spec, Job job) {
  const auto call = std::make_shared<Call>(shared_->reactor());
  call->spec = spec;
  call->job = std::move(job);
  call->own.spec = spec;
  if (!std::exchange(named_, true) && sockets_->rank() == 0) {
    call->own.id = shared_->device->new_id();
  }
  call->all.resize(static_cast<std::size_t>(sockets_->world_size()));
  queue_.push_back(call);
  ++under_way_;
  // Numbered now, whenever it is waited for.
  const Traffic before = shared_->transport->traffic();
  Task<> told = sockets_->all_gather(std::as_bytes(std::span(&call->own, 1)),
                                     std::as_writable_bytes(std::span(call->all)));
  // Little enough to be on its way already.
  const Traffic& after = shared_->transport->traffic();
  Traffic& sent = shared_->announcements;
  sent.same_host.payload_bytes += after.same_host.payload_bytes - before.same_host.payload_bytes;
  sent.other_hosts.payload_bytes +=
      after.other_hosts.payload_bytes - before.other_hosts.payload_bytes;
  shared_->reactor().spawn(announce(shared_from_this(), call, std::move(told)),
                           [self = shared_from_this(), call](std::exception_ptr error) {
                             std::erase(self->queue_, call);
                             self->fail(call, std::move(error));
                           });
  return wait(call);
}

Task<> Calls::announce(std::shared_ptr<Calls> self, std::shared_ptr<Call> call, Task<> told) {
  co_await std::move(told);
  self->require_agreement(*call);
  call->announced = true;
  self->launch_announced();
}

/// Every member sees the same list, and refuses for itself.
void Calls::require_agreement(const Call& call) const {
  for (std::size_t place = 0; place < call.all.size(); ++place) {
    if (call.all[place].spec == call.spec) continue;
    shared_->transport->fail(
        ErrorCode::kInvalidArgument,
        fmt::format("ranks made different calls: rank {} {}, rank {} {}; every rank must "
                    "make the same calls in the same order",
                    sockets_->rank(), describe(call.spec), place, describe(call.all[place].spec)));
    throw Error(*shared_->transport->failure());
  }
}

void Calls::launch_announced() {
  while (!queue_.empty() && queue_.front()->announced) {
    const auto call = queue_.front();
    queue_.pop_front();
    launch(call);
  }
}

void Calls::launch(const std::shared_ptr<Call>& call) {
  const bool first = !thread_;
  if (first) thread_ = std::make_unique<GroupThread>(shared_->device->new_group());
  Reactor& reactor = shared_->reactor();
  reactor.external_begin();
  thread_->run_next([self = shared_from_this(), call, first, &reactor](NcclGroup& group) mutable {
    std::optional<Error> fault;
    try {
      if (first) {
        group.join(call->all.front().id, self->sockets_->rank(), self->sockets_->world_size());
      }
      call->job(group);
    } catch (const Error& error) {
      fault = error;
    }
    // Nothing stays here: the last owner of the group must not go on its thread.
    reactor.post([self = std::move(self), call = std::move(call), fault = std::move(fault)] {
      self->ended(call, fault);
    });
  });
}

void Calls::ended(const std::shared_ptr<Call>& call, const std::optional<Error>& error) {
  work_ended(shared_->reactor());
  if (!error) {
    --under_way_;
    return call->done.set();
  }
  // Another's failure ends this call too; its reason is the better one.
  shared_->transport->fail(error->code(),
                           fmt::format("rank {}: {} through NCCL: {}", shared_->transport->rank(),
                                       describe(call->spec), error->what()));
  fail(call, std::make_exception_ptr(*shared_->transport->failure()));
}

class NcclCommunicator final : public CheckedCommunicator {
 public:
  NcclCommunicator(std::shared_ptr<Shared> shared, std::unique_ptr<ExchangeCommunicator> sockets)
      : shared_(shared), calls_(std::make_shared<Calls>(std::move(shared), std::move(sockets))) {
    calls_->listen();
  }
  ~NcclCommunicator() override { calls_->close(); }

  int rank() const noexcept override { return sockets().rank(); }
  int world_size() const noexcept override { return sockets().world_size(); }

  Task<> issue(const Call& call) override {
    switch (call.spec.kind) {
      case CallKind::kAllGather:
        return through_nccl(call, others() * call.input.size(), [call](NcclGroup& group) {
          group.all_gather(call.input, call.output);
        });
      case CallKind::kReduceScatter:
        return through_nccl(call, others() * call.output.size(), [call](NcclGroup& group) {
          group.reduce_scatter(call.input, call.output, dtype_of(call.spec.element));
        });
      case CallKind::kAllReduce:
        return through_nccl(call, 2 * others() * call.input.size() / (others() + 1),
                            [call](NcclGroup& group) {
                              group.all_reduce(call.output, dtype_of(call.spec.element));
                            });
      case CallKind::kAllToAll:
        return through_nccl(call, others() * call.spec.count, [call](NcclGroup& group) {
          group.all_to_all(call.input, call.output);
        });
      case CallKind::kBroadcast:
        return through_nccl(
            call, call.spec.root == rank() ? others() * call.input.size() : 0,
            [call](NcclGroup& group) { group.broadcast(call.output, call.spec.root); });
      case CallKind::kAllReduceValues:
      case CallKind::kBarrier:
      case CallKind::kSend:
      case CallKind::kRecv: break;
    }
    return sockets().issue(call);
  }

  void on_send(std::function<void(int from)> hear) override { sockets().on_send(std::move(hear)); }
  std::unique_ptr<Communicator> split(std::span<const int> members) override {
    return std::make_unique<NcclCommunicator>(shared_, sockets().part(members));
  }
  Traffic traffic() const override {
    Traffic all = sockets().traffic();
    const auto corrected = [](Traffic::Sent& total, const Traffic::Sent& by_nccl,
                              const Traffic::Sent& announced) {
      total.payload_bytes += by_nccl.payload_bytes - announced.payload_bytes;
      total.frame_bytes += announced.payload_bytes;
    };
    const Shared& its = *shared_;
    corrected(all.same_host, its.traffic.same_host, its.announcements.same_host);
    corrected(all.other_hosts, its.traffic.other_hosts, its.announcements.other_hosts);
    return all;
  }
  std::string description() const override {
    return shared_->device->description() +
           ", which sums in an order of its own, so bits differ from those of other back-ends; "
           "for the rest, " +
           sockets().description();
  }
  void abort(const std::string& reason) override { sockets().abort(reason); }

 private:
  Task<> refuse(const Error& error) override {
    shared_->transport->fail(error.code(), fmt::format("rank {} made a call that cannot be: {}",
                                                       shared_->transport->rank(), error.what()));
    return failing(std::make_exception_ptr(error));
  }
  /// `sent` bytes are what the operation must send; the way there is NCCL's choice.
  Task<> through_nccl(const Call& call, std::size_t sent, Calls::Job job) {
    Traffic& traffic = shared_->traffic;
    (shared_->transport->on_one_host() ? traffic.same_host : traffic.other_hosts).payload_bytes +=
        sent;
    return calls_->make(call.spec, std::move(job));
  }

  ExchangeCommunicator& sockets() const { return calls_->sockets(); }
  std::size_t others() const { return static_cast<std::size_t>(world_size()) - 1; }

  std::shared_ptr<Shared> shared_;
  std::shared_ptr<Calls> calls_;
};

}  // namespace

std::unique_ptr<Communicator> over_nccl(std::shared_ptr<ExchangeTransport> transport,
                                        std::shared_ptr<NcclDevice> device) {
  auto sockets = std::make_unique<ExchangeCommunicator>(transport);
  auto shared = std::make_shared<Shared>();
  shared->transport = std::move(transport);
  shared->device = std::move(device);
  return std::make_unique<NcclCommunicator>(std::move(shared), std::move(sockets));
}

}  // namespace ziggurat
