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
#include "collectives/call_shape.h"

namespace ziggurat {
namespace {

using wire::CallKind;
using wire::CallSpec;

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
class Lane {
 public:
  explicit Lane(std::unique_ptr<NcclGroup> group) : group_(std::move(group)) {
    thread_ = std::thread([this] { run(); });
  }
  ~Lane() {
    group_->abort();
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    woken_.notify_one();
    thread_.join();
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

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

  Calls(std::shared_ptr<Shared> shared, std::unique_ptr<Communicator> sockets)
      : shared_(std::move(shared)), sockets_(std::move(sockets)) {}

  Communicator& sockets() noexcept { return *sockets_; }
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
    shared_->transport->fail(ErrorCode::kCancelled, "a communicator is closed, calls pending");
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
  std::unique_ptr<Communicator> sockets_;
  std::deque<std::shared_ptr<Call>> queue_;  // not yet launched, in order
  std::unique_ptr<Lane> lane_;               // from the first call on
  std::size_t under_way_ = 0;
  bool named_ = false;
};

/// The transport has failed.
void Calls::give_up() {
  const auto failure = std::make_exception_ptr(*shared_->transport->failure());
  for (const auto& call : std::exchange(queue_, {})) fail(call, failure);
  if (lane_) lane_->abort();
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
                    sockets_->rank(), wire::describe(call.spec), place,
                    wire::describe(call.all[place].spec)));
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
  const bool first = !lane_;
  if (first) lane_ = std::make_unique<Lane>(shared_->device->new_group());
  Reactor& reactor = shared_->reactor();
  reactor.external_begin();
  lane_->run_next([self = shared_from_this(), call, first, &reactor](NcclGroup& group) mutable {
    std::optional<Error> fault;
    try {
      if (first) {
        group.join(call->all.front().id, self->sockets_->rank(), self->sockets_->world_size());
      }
      call->job(group);
    } catch (const Error& error) {
      fault = error;
    }
    // Nothing stays here: the lane must not end on its own thread.
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
                                       wire::describe(call->spec), error->what()));
  fail(call, std::make_exception_ptr(*shared_->transport->failure()));
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::shared_ptr<Shared> shared, std::unique_ptr<Communicator> sockets)
      : shared_(shared), calls_(std::make_shared<Calls>(std::move(shared), std::move(sockets))) {
    calls_->listen();
  }
  ~NcclCommunicator() override { calls_->close(); }

  int rank() const noexcept override { return sockets().rank(); }
  int world_size() const noexcept override { return sockets().world_size(); }

  Task<> all_gather(std::span<const std::byte> input, std::span<std::byte> output) override {
    if (auto task = refused([&] { check_all_gather(input.size(), output.size(), world_size()); }))
      return std::move(*task);
    count(others() * input.size());
    return calls_->make({.kind = CallKind::kAllGather, .count = input.size()},
                        [=](NcclGroup& group) { group.all_gather(input, output); });
  }
  Task<> reduce_scatter(std::span<const std::byte> input, std::span<std::byte> output,
                        DType dtype) override {
    if (auto task = refused(
            [&] { check_reduce_scatter(input.size(), output.size(), dtype, world_size()); }))
      return std::move(*task);
    count(others() * output.size());
    return calls_->make({.kind = CallKind::kReduceScatter,
                         .element = wire::element_of(dtype),
                         .count = output.size() / size_bytes(dtype)},
                        [=](NcclGroup& group) { group.reduce_scatter(input, output, dtype); });
  }
  Task<> all_reduce(std::span<std::byte> values, DType dtype) override {
    if (auto task = refused([&] { check_all_reduce(values.size(), dtype); }))
      return std::move(*task);
    count(2 * others() * values.size() / static_cast<std::size_t>(world_size()));
    return calls_->make({.kind = CallKind::kAllReduce,
                         .element = wire::element_of(dtype),
                         .count = values.size() / size_bytes(dtype)},
                        [=](NcclGroup& group) { group.all_reduce(values, dtype); });
  }
  Task<> all_to_all(std::span<const std::byte> input, std::span<std::byte> output) override {
    if (auto task = refused([&] { check_all_to_all(input.size(), output.size(), world_size()); }))
      return std::move(*task);
    const std::size_t each = input.size() / static_cast<std::size_t>(world_size());
    count(others() * each);
    return calls_->make({.kind = CallKind::kAllToAll, .count = each},
                        [=](NcclGroup& group) { group.all_to_all(input, output); });
  }
  Task<> broadcast(std::span<std::byte> bytes, int root) override {
    if (auto task = refused([&] { check_root(root, world_size()); })) return std::move(*task);
    if (root == rank()) count(others() * bytes.size());
    return calls_->make({.kind = CallKind::kBroadcast, .root = root, .count = bytes.size()},
                        [=](NcclGroup& group) { group.broadcast(bytes, root); });
  }

  Task<> all_reduce(std::span<double> values, Op op) override {
    return sockets().all_reduce(values, op);
  }
  Task<> all_reduce(std::span<std::uint64_t> values, Op op) override {
    return sockets().all_reduce(values, op);
  }
  Task<> barrier() override { return sockets().barrier(); }
  Task<> send(std::span<const std::byte> bytes, int to) override {
    return sockets().send(bytes, to);
  }
  Task<> recv(std::span<std::byte> bytes, int from) override { return sockets().recv(bytes, from); }

  std::unique_ptr<Communicator> split(std::span<const int> members) override {
    return std::make_unique<NcclCommunicator>(shared_, sockets().split(members));
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
           ", which sums in an order of its own: bits differ from those of other back-ends; "
           "beside it " +
           sockets().description();
  }
  void abort(const std::string& reason) override { sockets().abort(reason); }

 private:
  /// Runs `check`; a call that cannot be is an error here, and the end of waiting for it elsewhere.
  template <class Check>
  std::optional<Task<>> refused(const Check& check) {
    try {
      check();
    } catch (const Error& error) {
      shared_->transport->fail(error.code(), fmt::format("rank {} made a call that cannot be: {}",
                                                         shared_->transport->rank(), error.what()));
      return failing(error);
    }
    return std::nullopt;
  }
  static Task<> failing(Error error) {
    throw error;
    co_return;
  }

  Communicator& sockets() const { return calls_->sockets(); }
  std::size_t others() const { return static_cast<std::size_t>(world_size()) - 1; }
  /// What the operation must send; the way there is NCCL's choice.
  void count(std::size_t bytes) {
    (shared_->transport->on_one_host() ? shared_->traffic.same_host : shared_->traffic.other_hosts)
        .payload_bytes += bytes;
  }

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
