// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/nccl_ranks.cc: carries calls and groups from their announcement to their end.
#include "collectives/nccl/nccl_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "base/log.h"

namespace ziggurat {
namespace {

/// How long sockets may take to report a rank that NCCL misses.
constexpr Nanoseconds kNewsMost = std::chrono::seconds(1);

/// What members tell each other of a call before it is given to NCCL.
struct Announcement {
  CallSpec spec;
  bool direct = false;  // the bytes of the rank lie on its GPU

  bool operator==(const Announcement&) const = default;
};

template <class T>
std::span<std::byte> bytes_of(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

}  // namespace

struct NcclRanks::Issued {
  Issued(Reactor& reactor, std::shared_ptr<Caller> its_caller, const Call& what)
      : caller(std::move(its_caller)), call(what), done(reactor) {}
  std::shared_ptr<Caller> caller;
  Call call;
  CallOrder::Key key;
  Announcement own;
  std::vector<Announcement> all;
  Signal done;
};

/// What members of a group tell each other before they join.
struct NcclRanks::Introduction {
  NcclDevice::Id id{};  // the first member's
  std::array<char, 32> gpu{};
  std::int32_t version = 0;
  Reduce reduce = Reduce::kRanks;
};

std::shared_ptr<NcclRanks> NcclRanks::create(std::shared_ptr<ExchangeTransport> transport,
                                             ExchangeCommunicator& all,
                                             std::unique_ptr<NcclDevice> device,
                                             const NcclOptions& options) {
  auto ranks = std::make_shared<NcclRanks>(std::move(transport), all, std::move(device), options);
  ranks->transport_->outlast(ranks->order_->communicator());
  ranks->order_->listen();
  ranks->transport_->on_failure([weak = ranks->weak_from_this()] {
    if (const auto self = weak.lock()) self->give_up();
  });
  NcclRanks* const itself = ranks.get();
  return {itself, [ranks = std::move(ranks)](NcclRanks*) mutable {
            Reactor& reactor = ranks->transport_->reactor();
            if (!reactor.on_reactor_thread()) reactor.block_on(part(ranks));
            ranks->lane_.end();
          }};
}

NcclRanks::NcclRanks(std::shared_ptr<ExchangeTransport> transport, ExchangeCommunicator& all,
                     std::unique_ptr<NcclDevice> device, const NcclOptions& options)
    : transport_(std::move(transport)),
      options_(options),
      announced_(std::make_shared<AnnouncedBytes>(*transport_)),
      all_(all.part(all.members())),
      order_(
          std::make_shared<CallOrder>(transport_->reactor(), all.part(all.members()), announced_)),
      lane_(transport_->reactor(), std::move(device)) {}

/// Parts from the other ranks. The transport's part() is the goodbye of all: a rank that still
/// calls this one learns that it has left.
Task<> NcclRanks::part(std::shared_ptr<NcclRanks> self) {
  for (const auto& [members, group] : self->groups_) {
    try {
      co_await group->joined.wait();
    } catch (const Error&) {  // the callers were told
    }
  }
  Task<bool> parted = ExchangeTransport::part(self->transport_, self->options_.timeout);
  const bool all = co_await std::move(parted);
  NcclLane::Job end = [all](NcclDevice& device) {
    if (all) {
      device.finish();
    } else {
      device.abort();
    }
  };
  Task<> ended = self->lane_.run(std::move(end));
  try {
    co_await std::move(ended);
  } catch (const Error& error) {
    log().info("rank {}: NCCL was not shut down cleanly: {}", self->transport_->rank(),
               error.what());
  }
}

void NcclRanks::give_up() {
  lane_.give_up();
  order_->fail(std::make_exception_ptr(*transport_->failure()));
}

void NcclRanks::Group::fail(const std::exception_ptr& error) {
  if (!queued.is_set()) queued.fail(error);
  if (!joined.is_set()) joined.fail(error);
}

/// Waits a moment for the sockets' report. NCCL may fail because of a rank that is gone before
/// sockets report that rank, and NCCL does not say which rank it was.
Task<> NcclRanks::wait_for_news(std::shared_ptr<NcclRanks> self, ErrorCode code) {
  if (code != ErrorCode::kUnavailable) co_return;
  Clock& clock = self->transport_->reactor().clock();
  const Nanoseconds give_up = clock.now() + kNewsMost;
  while (!self->transport_->failed() && clock.now() < give_up) {
    const auto turn = std::make_shared<Signal>(self->transport_->reactor());
    clock.after(std::chrono::milliseconds(1), [turn] { turn->set(); });
    co_await turn->wait();
  }
}

/// Fails the calls of all ranks. If another rank's failure came first, its reason is the better
/// one, and `what` says what that failure ended on this rank.
void NcclRanks::fail(const Error& error, const std::string& what) {
  const int rank = transport_->rank();
  transport_->fail(error.code(), fmt::format("rank {}: {}: {}", rank, what, error.what()));
  const Error& first = *transport_->failure();
  const std::string why = first.what();
  if (why.find(what) != std::string::npos) throw Error(first);
  throw Error(first.code(), fmt::format("{}; rank {} was in {}", why, rank, what));
}

std::shared_ptr<NcclRanks::Caller> NcclRanks::caller(
    std::shared_ptr<ExchangeCommunicator> sockets) {
  auto its = std::make_shared<Caller>();
  std::shared_ptr<Group>& group = groups_[sockets->members()];
  if (!group) {
    // Split off from all ranks, not from `sockets`: ranks may split two communicators in two
    // orders.
    group = std::make_shared<Group>(transport_->reactor(), all_->part(sockets->members()));
    order_->expect({group->sockets->id(), 0});
    transport_->reactor().spawn(join(shared_from_this(), group),
                                [group](const std::exception_ptr& error) { group->fail(error); });
  }
  its->group = group;
  its->sockets = std::move(sockets);
  return its;
}

Task<> NcclRanks::introduce(std::shared_ptr<NcclRanks> self, std::shared_ptr<Group> group,
                            std::shared_ptr<std::vector<Introduction>> all) {
  const NcclDevice& device = self->lane_.device();
  const auto own = std::make_shared<Introduction>();
  device.gpu().copy(own->gpu.data(), own->gpu.size() - 1);
  own->version = device.version();
  own->reduce = self->options_.reduce;
  if (group->sockets->rank() == 0) {
    NcclLane::Job make_id = [own](NcclDevice& its) { own->id = its.new_id(); };
    Task<> made = self->lane_.run(std::move(make_id));
    co_await std::move(made);
  }
  all->resize(static_cast<std::size_t>(group->sockets->world_size()));
  Task<> told = self->announced_->of([&] {
    return group->sockets->all_gather(std::as_bytes(std::span(own.get(), 1)), bytes_of(*all));
  });
  co_await std::move(told);
}

Task<> NcclRanks::join(std::shared_ptr<NcclRanks> self, std::shared_ptr<Group> group) {
  ExchangeCommunicator& sockets = *group->sockets;
  const CallOrder::Key key{sockets.id(), 0};
  const std::string what = fmt::format("joining {} ranks through NCCL", sockets.world_size());
  std::optional<Error> failed;
  try {
    const auto all = std::make_shared<std::vector<Introduction>>();
    Task<> met = introduce(self, group, all);
    co_await std::move(met);
    self->require_compatible(*group, *all);
    if (sockets.rank() == 0) self->order_->ask(key, sockets.members());
    Task<> turn = self->order_->turn(key);
    co_await std::move(turn);
    const NcclDevice::Place place{sockets.rank(), sockets.world_size()};
    NcclLane::Job job = [group, place, id = all->front().id](NcclDevice& device) {
      group->number = device.join(id, place);
    };
    Task<> joined = self->lane_.run(std::move(job));
    self->order_->taken(key);
    group->queued.set();
    co_await std::move(joined);
    group->joined.set();
  } catch (const Error& error) {
    failed = error;
  }
  if (!failed) co_return;
  co_await wait_for_news(self, failed->code());
  self->fail(*failed, what);
}

void NcclRanks::require_compatible(const Group& group, const std::vector<Introduction>& all) const {
  const std::vector<int>& members = group.sockets->members();
  const auto refuse = [](const std::string& why) { throw Error(ErrorCode::kInvalidArgument, why); };
  for (std::size_t a = 0; a < all.size(); ++a) {
    if (all[a].reduce != all.front().reduce) {
      refuse(fmt::format(
          "rank {} has ZIGGURAT_REDUCE={}, but rank {} has {}; give all ranks the same value",
          members.front(), to_string(all.front().reduce), members[a], to_string(all[a].reduce)));
    }
    if (all[a].version != all.front().version) {
      refuse(fmt::format(
          "rank {} has NCCL {}, but rank {} has {}; install the same version for all ranks",
          members.front(), all.front().version, members[a], all[a].version));
    }
    for (std::size_t b = 0; b < a; ++b) {
      const bool one_host =
          transport_->on_this_host(members[a]) && transport_->on_this_host(members[b]);
      if (!one_host || all[a].gpu != all[b].gpu) continue;
      refuse(fmt::format(
          "rank {} and rank {} both use GPU {} of one host; give each rank a GPU of its own "
          "(with Slurm's gpus-per-task=1, or another CUDA_VISIBLE_DEVICES), or use "
          "`collectives=auto`",
          members[b], members[a], all[a].gpu.data()));
    }
  }
}

Task<> NcclRanks::end_of(std::shared_ptr<Issued> call) { co_await call->done.wait(); }

Task<> NcclRanks::make(const std::shared_ptr<Caller>& caller, const Call& call, std::size_t sent) {
  const auto issued = std::make_shared<Issued>(transport_->reactor(), caller, call);
  issued->key = {caller->sockets->id(), caller->calls++};
  issued->own = {call.spec, lane_.device().holds(call.input) && lane_.device().holds(call.output)};
  issued->all.resize(static_cast<std::size_t>(caller->sockets->world_size()));
  ++caller->under_way;
  through_nccl_ += sent;
  order_->expect(issued->key);
  // The call is numbered now, no matter when it is awaited.
  Task<> told = announced_->of([&] {
    return caller->sockets->all_gather(std::as_bytes(std::span(&issued->own, 1)),
                                       bytes_of(issued->all));
  });
  transport_->reactor().spawn(carry_out(shared_from_this(), issued, std::move(told)),
                              [](const std::exception_ptr&) {});
  return end_of(issued);
}

Task<> NcclRanks::carry_out(std::shared_ptr<NcclRanks> self, std::shared_ptr<Issued> call,
                            Task<> told) {
  std::exception_ptr failure;
  try {
    Task<> ran = run(self, call, std::move(told));
    co_await std::move(ran);
  } catch (...) {
    failure = std::current_exception();
  }
  --call->caller->under_way;
  if (!failure) co_return call->done.set();
  call->done.fail(failure);
}

Task<> NcclRanks::run(std::shared_ptr<NcclRanks> self, std::shared_ptr<Issued> call, Task<> told) {
  ExchangeCommunicator& sockets = *call->caller->sockets;
  const std::shared_ptr<Group> group = call->caller->group;
  std::optional<Error> failed;
  try {
    co_await std::move(told);
    self->require_agreement(*call);
    co_await group->queued.wait();
    if (sockets.rank() == 0) self->order_->ask(call->key, sockets.members());
    Task<> turn = self->order_->turn(call->key);
    co_await std::move(turn);
    // How the call is cut into pieces depends on where all ranks have their bytes, so all cut it
    // alike.
    const bool direct = std::ranges::all_of(call->all, &Announcement::direct);
    NcclLane::Job job = [group, call, direct](NcclDevice& device) {
      device.make(group->number, call->call, direct);
    };
    Task<> ran = self->lane_.run(std::move(job));
    self->order_->taken(call->key);
    co_await std::move(ran);
  } catch (const Error& error) {
    failed = error;
  }
  if (!failed) co_return;
  co_await wait_for_news(self, failed->code());
  self->fail(*failed, describe(call->call.spec) + " through NCCL");
}

/// Checks that all members made the same call. Every member sees the same list, and throws by
/// itself.
void NcclRanks::require_agreement(const Issued& call) const {
  for (std::size_t place = 0; place < call.all.size(); ++place) {
    if (call.all[place].spec == call.own.spec) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("ranks made different calls: rank {} {}, rank {} {}; let every rank make the "
                    "same calls in the same order",
                    call.caller->sockets->rank(), describe(call.own.spec), place,
                    describe(call.all[place].spec)));
  }
}

std::string NcclRanks::description() const { return lane_.device().description(); }

Traffic NcclRanks::traffic() const {
  Traffic all = transport_->traffic();
  const auto as_frames = [](Traffic::Sent& total, std::uint64_t announced) {
    total.payload_bytes -= announced;
    total.frame_bytes += announced;
  };
  as_frames(all.same_host, announced_->same_host);
  as_frames(all.other_hosts, announced_->other_hosts);
  (transport_->on_one_host() ? all.same_host : all.other_hosts).payload_bytes += through_nccl_;
  return all;
}

}  // namespace ziggurat
