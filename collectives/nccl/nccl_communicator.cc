// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/nccl_communicator.cc: decides which calls go through NCCL, and counts what they
// cost.
#include "collectives/nccl/nccl_communicator.h"

#include <fmt/format.h>

#include <utility>

#include "collectives/checked_communicator.h"
#include "collectives/nccl/nccl_ranks.h"

namespace ziggurat {
namespace {

class NcclCommunicator final : public CheckedCommunicator {
 public:
  NcclCommunicator(std::shared_ptr<NcclRanks> ranks, std::shared_ptr<ExchangeCommunicator> sockets,
                   Reduce reduce)
      : ranks_(std::move(ranks)), caller_(ranks_->caller(std::move(sockets))), reduce_(reduce) {}
  ~NcclCommunicator() override {
    // Fails the transport, so that other ranks do not wait for calls that this communicator leaves
    // under way.
    if (caller_->under_way == 0) return;
    ranks_->transport().fail(ErrorCode::kCancelled,
                             "a communicator was closed while its calls were under way");
  }

  int rank() const noexcept override { return sockets().rank(); }
  int world_size() const noexcept override { return sockets().world_size(); }

  Task<> issue(const Call& call) override {
    switch (call.spec.kind) {
      case CallKind::kAllGather: return make(call, others() * call.input.size());
      case CallKind::kReduceScatter: return make(call, others() * call.output.size());
      case CallKind::kAllReduce:
        return make(call, 2 * others() * call.input.size() / (others() + 1));
      case CallKind::kAllToAll: return make(call, others() * call.spec.count);
      case CallKind::kAllReduceValues:
      case CallKind::kBarrier:
      case CallKind::kSend:
      case CallKind::kRecv: break;
    }
    return sockets().issue(call);
  }

  void on_send(std::function<void(int from)> hear) override { sockets().on_send(std::move(hear)); }
  std::unique_ptr<Communicator> split(std::span<const int> members) override {
    return std::make_unique<NcclCommunicator>(ranks_, sockets().part(members), reduce_);
  }
  Traffic traffic() const override { return ranks_->traffic(); }
  std::string description() const override {
    const char* const who = reduce_ == Reduce::kNccl
                                ? ", which sums in an order of its own, so bits differ from those "
                                  "of other back-ends"
                                : ", sums in rank order";
    return ranks_->description() + who + "; for the rest, " + sockets().description();
  }
  void abort(const std::string& reason) override { sockets().abort(reason); }

  /// Waits until the members have joined.
  Task<> joined() { return caller_->group->joined.wait(); }

 private:
  Task<> refuse(const Error& error) override {
    ExchangeTransport& transport = ranks_->transport();
    transport.fail(error.code(),
                   fmt::format("rank {} made an invalid call: {}", transport.rank(), error.what()));
    return failing(std::make_exception_ptr(error));
  }
  Task<> make(const Call& call, std::size_t sent) { return ranks_->make(caller_, call, sent); }

  ExchangeCommunicator& sockets() const { return *caller_->sockets; }
  std::size_t others() const { return static_cast<std::size_t>(world_size()) - 1; }

  std::shared_ptr<NcclRanks> ranks_;
  std::shared_ptr<NcclRanks::Caller> caller_;
  Reduce reduce_;
};

/// What is opened. The transport has started: frames of other ranks arrive on the reactor, so only
/// the reactor may use it.
struct Opening {
  std::shared_ptr<ExchangeTransport> transport;
  std::unique_ptr<NcclDevice> device;
  const NcclOptions& options;
  /// The caller's thread holds the ranks too, so that after a failure they are destroyed on it.
  std::shared_ptr<NcclRanks> ranks{};
  std::unique_ptr<NcclCommunicator> made{};
};

Task<> open(Opening& its) {
  auto sockets = std::make_shared<ExchangeCommunicator>(its.transport);
  its.ranks =
      NcclRanks::create(std::move(its.transport), *sockets, std::move(its.device), its.options);
  its.made = std::make_unique<NcclCommunicator>(its.ranks, std::move(sockets), its.options.reduce);
  Task<> joined = its.made->joined();
  co_await std::move(joined);
}

}  // namespace

std::unique_ptr<Communicator> over_nccl(std::shared_ptr<ExchangeTransport> transport,
                                        std::unique_ptr<NcclDevice> device,
                                        const NcclOptions& options) {
  Reactor& reactor = transport->reactor();
  Opening opening{
      .transport = std::move(transport), .device = std::move(device), .options = options};
  reactor.block_on(open(opening));
  return std::move(opening.made);
}

}  // namespace ziggurat
