// SPDX-License-Identifier: Apache-2.0
// tests/collectives/communicator_conformance_test.cc: what every Communicator promises, run on
// every back-end.
//
// A back-end is a row of kBackends: a name, a number of ranks and a factory for those of them that
// are in this process, on one reactor. Each case runs the same coroutine on every rank at once.
// Where a launcher started this program (communicator_conformance_mpi_*, ..._nccl_*), each process
// has one rank, and `mpi` or `nccl` is a row too.
#include <gmock/gmock.h>

#include <bit>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "base/error.h"
#include "base/numerics/float16.h"
#include "base/runtime/async.h"
#include "base/runtime/worker_pool.h"
#include "collectives/exchange/exchange_communicator.h"
#include "collectives/mpi/mpi_link.h"
#include "collectives/rendezvous/rendezvous.h"
#include "collectives/self_communicator.h"
#include "collectives/simulated/simulated_communicator.h"
#include "tests/collectives/tcp_ranks.h"

namespace ziggurat {
namespace {

using Ranks = std::vector<std::unique_ptr<Communicator>>;

struct Backend {
  const char* name;
  int world_size;
  std::function<Ranks(Reactor& reactor, int world_size)> create;
  Clock::Kind clock = Clock::Kind::kReal;
};

WorkerPool& two_workers() {
  static WorkerPool workers({.threads = 2, .cpus = {}});
  return workers;
}

Ranks create_self(Reactor&, int) {
  Ranks ranks;
  ranks.push_back(std::make_unique<SelfCommunicator>());
  return ranks;
}

Ranks create_connected(Reactor& reactor, int world_size, std::size_t ranks_per_host) {
  const std::vector<Reactor*> reactors(static_cast<std::size_t>(world_size), &reactor);
  Ranks ranks;
  for (TcpOptions& options : connected_options(reactors, ranks_per_host)) {
    ranks.push_back(std::make_unique<ExchangeCommunicator>(ExchangeTransport::create(
        reactor, two_workers(), over_sockets(reactor, std::move(options)))));
  }
  return ranks;
}

Ranks create_tcp(Reactor& reactor, int world_size) {
  return create_connected(reactor, world_size, 0);
}
/// Ranks of one host, reading each other's memory.
Ranks create_memory(Reactor& reactor, int world_size) {
  return create_connected(reactor, world_size, 64);
}
/// Hosts of two ranks.
Ranks create_mixed(Reactor& reactor, int world_size) {
  return create_connected(reactor, world_size, 2);
}

/// Hosts of one rank: frames that others could forge are sealed.
Ranks create_sealed(Reactor& reactor, int world_size) {
  return create_connected(reactor, world_size, 1);
}

/// Nodes of two ranks.
Ranks create_simulated(Reactor& reactor, int world_size) {
  return SimulatedCommunicator::create(
      reactor, {.ranks = world_size,
                .ranks_per_node = 2,
                .within_node = {.bytes_per_s = 10e9, .latency = std::chrono::microseconds(1)},
                .between_nodes = {.bytes_per_s = 1e9, .latency = std::chrono::microseconds(20)}});
}

const Backend kBackends[] = {{"self", 1, create_self},
                             {"tcp", 2, create_tcp},
                             {"tcp", 3, create_tcp},
                             {"tcp", 4, create_tcp},
                             {"memory", 2, create_memory},
                             {"memory", 3, create_memory},
                             {"memory", 4, create_memory},
                             {"mixed", 3, create_mixed},
                             {"mixed", 4, create_mixed},
                             {"sealed", 2, create_sealed},
                             {"sealed", 3, create_sealed},
                             {"simulated", 1, create_simulated, Clock::Kind::kVirtual},
                             {"simulated", 2, create_simulated, Clock::Kind::kVirtual},
                             {"simulated", 5, create_simulated, Clock::Kind::kVirtual}};

/// Keeps MPI from one case to the next: it starts once in a process.
class KeepMpi : public testing::Environment {
 public:
  void TearDown() override { link.reset(); }
  std::shared_ptr<MpiLink> link;
};
KeepMpi* const kept_mpi =
    static_cast<KeepMpi*>(testing::AddGlobalTestEnvironment(new KeepMpi));  // NOLINT: gtest's

/// This process's rank.
Ranks create_launched(Reactor& reactor, Collectives collectives) {
  RankOptions options = rank_options();
  options.collectives = collectives;
  Ranks ranks;
  ranks.push_back(connect_ranks(reactor, two_workers(), options));
  return ranks;
}
Ranks create_mpi(Reactor& reactor, int) {
  if (!kept_mpi->link) kept_mpi->link = MpiLink::open();
  return create_launched(reactor, Collectives::kMpi);
}
Ranks create_nccl(Reactor& reactor, int) { return create_launched(reactor, Collectives::kNccl); }

std::vector<Backend> launched_backends() {
  const RankOptions options = rank_options();
  if (options.world_size == 1) return {};
  if (options.collectives == Collectives::kNccl) return {{"nccl", options.world_size, create_nccl}};
  if (!process_environment("OMPI_COMM_WORLD_SIZE") && !process_environment("PMI_SIZE")) return {};
  return {{"mpi", options.world_size, create_mpi}};
}

std::vector<std::byte> pattern(std::size_t size_bytes, int rank) {
  std::mt19937 random(17u + static_cast<unsigned>(rank));
  std::vector<std::byte> bytes(size_bytes);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

class CommunicatorConformance : public testing::TestWithParam<Backend> {
 protected:
  using OnRank = std::function<Task<>(Communicator&)>;

  /// Runs `body` on every rank at once; rethrows the first failure.
  void on_every_rank(const OnRank& body) {
    Reactor& on = reactor_;
    const auto all = [this, &body]() -> Task<> {
      WorkGroup group(reactor_);
      for (const auto& rank : ranks_) group.spawn(body(*rank));
      co_await group.wait_idle();
    };
    on.block_on(all());
  }
  std::size_t world() const { return static_cast<std::size_t>(GetParam().world_size); }

  Reactor reactor_{GetParam().clock};
  Ranks ranks_ = GetParam().create(reactor_, GetParam().world_size);
};

TEST_P(CommunicatorConformance, ranks_are_numbered_from_zero) {
  for (const auto& rank : ranks_) EXPECT_EQ(rank->world_size(), GetParam().world_size);
  const OnRank body = [&](Communicator& c) -> Task<> {
    std::vector<std::uint64_t> places(world());
    places[static_cast<std::size_t>(c.rank())] = 1;
    co_await c.all_reduce(std::span(places), Communicator::Op::kSum);
    EXPECT_THAT(places, testing::Each(1u));
  };
  on_every_rank(body);
}

TEST_P(CommunicatorConformance, all_gather_puts_each_ranks_bytes_in_its_slice) {
  for (const std::size_t n : {0u, 1u, 7u, 4096u, 65537u, 3'000'001u}) {
    const OnRank body = [&](Communicator& c) -> Task<> {
      const auto mine = pattern(n, c.rank());
      std::vector<std::byte> all(n * world());
      co_await c.all_gather(mine, all);
      for (std::size_t r = 0; r < world(); ++r) {
        const std::vector<std::byte> slice(all.begin() + static_cast<std::ptrdiff_t>(r * n),
                                           all.begin() + static_cast<std::ptrdiff_t>((r + 1) * n));
        EXPECT_EQ(slice, pattern(n, static_cast<int>(r))) << n << " bytes, slice " << r;
      }
    };
    on_every_rank(body);
  }
}

TEST_P(CommunicatorConformance, all_gather_works_in_place) {
  constexpr std::size_t kBytes = 1000;
  const OnRank body = [&](Communicator& c) -> Task<> {
    std::vector<std::byte> all(kBytes * world());
    const std::span<std::byte> slice =
        std::span(all).subspan(static_cast<std::size_t>(c.rank()) * kBytes, kBytes);
    const auto mine = pattern(kBytes, c.rank());
    std::copy(mine.begin(), mine.end(), slice.begin());
    co_await c.all_gather(slice, all);
    for (std::size_t r = 0; r < world(); ++r) {
      const auto expected = pattern(kBytes, static_cast<int>(r));
      EXPECT_EQ(std::memcmp(all.data() + r * kBytes, expected.data(), kBytes), 0);
    }
  };
  on_every_rank(body);
}

// The specification: fp32 sums in rank order, rounded once.
TEST_P(CommunicatorConformance, reduce_scatter_sums_fp32_in_rank_order) {
  constexpr std::size_t kCount = 513;
  const auto value = [](std::size_t rank, std::size_t i) {
    return (static_cast<float>(i) - 256.0f) / 3.0f + static_cast<float>(rank) * 1e-3f;
  };
  const OnRank body = [&](Communicator& c) -> Task<> {
    const auto me = static_cast<std::size_t>(c.rank());
    std::vector<float> input(kCount * world());
    for (std::size_t i = 0; i < input.size(); ++i) input[i] = value(me, i);
    std::vector<float> output(kCount);
    co_await c.reduce_scatter(std::as_bytes(std::span(input)),
                              std::as_writable_bytes(std::span(output)), DType::kFloat32);
    for (std::size_t i = 0; i < kCount; ++i) {
      float sum = value(0, me * kCount + i);
      for (std::size_t r = 1; r < world(); ++r) sum += value(r, me * kCount + i);
      EXPECT_EQ(std::bit_cast<std::uint32_t>(output[i]), std::bit_cast<std::uint32_t>(sum)) << i;
    }
  };
  on_every_rank(body);
}

TEST_P(CommunicatorConformance, reduce_scatter_rounds_bf16_once) {
  constexpr std::size_t kCount = 300;
  const auto value = [](std::size_t rank, std::size_t i) {
    return float_to_bf16(static_cast<float>(i) * 0.37f - static_cast<float>(rank));
  };
  const OnRank body = [&](Communicator& c) -> Task<> {
    const auto me = static_cast<std::size_t>(c.rank());
    std::vector<bf16> input(kCount * world());
    for (std::size_t i = 0; i < input.size(); ++i) input[i] = value(me, i);
    std::vector<bf16> output(kCount);
    co_await c.reduce_scatter(std::as_bytes(std::span(input)),
                              std::as_writable_bytes(std::span(output)), DType::kBFloat16);
    for (std::size_t i = 0; i < kCount; ++i) {
      float sum = bf16_to_float(value(0, me * kCount + i));
      for (std::size_t r = 1; r < world(); ++r) sum += bf16_to_float(value(r, me * kCount + i));
      EXPECT_EQ(output[i], float_to_bf16(sum)) << i;
    }
  };
  on_every_rank(body);
}

// Slices of more than one chunk, and a count that ranks do not divide.
TEST_P(CommunicatorConformance, all_reduce_has_the_bits_of_its_specification) {
  const auto value = [](std::size_t rank, std::size_t i) {
    return static_cast<float>(static_cast<int>(i % 2003) - 1000) / 7.0f +
           static_cast<float>(rank) * 1e-3f;
  };
  for (const std::size_t count : {0u, 1u, 2u, 5u, 1000u, 700'003u}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      const auto rounded = [&](float x) -> float {
        if (dtype == DType::kBFloat16) return bf16_to_float(float_to_bf16(x));
        return dtype == DType::kFloat16 ? fp16_to_float(float_to_fp16(x)) : x;
      };
      const auto put = [&](std::vector<std::byte>& bytes, std::size_t i, float x) {
        const std::uint16_t half = dtype == DType::kBFloat16 ? float_to_bf16(x) : float_to_fp16(x);
        const void* from = dtype == DType::kFloat32 ? static_cast<const void*>(&x) : &half;
        std::memcpy(bytes.data() + i * size_bytes(dtype), from, size_bytes(dtype));
      };
      std::vector<std::byte> expected(count * size_bytes(dtype));
      for (std::size_t i = 0; i < count; ++i) {
        float sum = rounded(value(0, i));
        for (std::size_t r = 1; r < world(); ++r) sum += rounded(value(r, i));
        put(expected, i, sum);
      }
      const OnRank body = [&](Communicator& c) -> Task<> {
        std::vector<std::byte> values(expected.size());
        for (std::size_t i = 0; i < count; ++i) {
          put(values, i, value(static_cast<std::size_t>(c.rank()), i));
        }
        co_await c.all_reduce(values, dtype);
        EXPECT_TRUE(values == expected) << count << " of " << to_string(dtype);
      };
      on_every_rank(body);
    }
  }
}

TEST_P(CommunicatorConformance, reduce_scatter_may_write_its_sum_over_its_own_contribution) {
  constexpr std::size_t kCount = 200'001;
  const OnRank body = [&](Communicator& c) -> Task<> {
    std::vector<float> values(kCount * world(), static_cast<float>(c.rank() + 1));
    const auto slice =
        std::span(values).subspan(static_cast<std::size_t>(c.rank()) * kCount, kCount);
    co_await c.reduce_scatter(std::as_bytes(std::span(values)), std::as_writable_bytes(slice),
                              DType::kFloat32);
    const auto sum = static_cast<float>(world() * (world() + 1) / 2);
    EXPECT_TRUE(std::ranges::all_of(slice, [&](float x) { return x == sum; }));
  };
  on_every_rank(body);
}

TEST_P(CommunicatorConformance, all_to_all_gives_slice_r_to_rank_r) {
  for (const std::size_t n : {0u, 3u, 100'000u}) {
    const auto sent = [&](std::size_t from, std::size_t to) {
      return pattern(n, static_cast<int>(from * 16 + to));
    };
    const OnRank body = [&](Communicator& c) -> Task<> {
      const auto me = static_cast<std::size_t>(c.rank());
      std::vector<std::byte> input;
      std::vector<std::byte> expected;
      for (std::size_t r = 0; r < world(); ++r) {
        const auto out = sent(me, r);
        const auto in = sent(r, me);
        input.insert(input.end(), out.begin(), out.end());
        expected.insert(expected.end(), in.begin(), in.end());
      }
      std::vector<std::byte> output(input.size());
      co_await c.all_to_all(input, output);
      EXPECT_TRUE(output == expected) << n << " bytes a slice";
    };
    on_every_rank(body);
  }
}

TEST_P(CommunicatorConformance, sends_arrive_in_order_around_a_ring) {
  if (world() == 1) GTEST_SKIP() << "one rank has nobody to send to";
  const OnRank body = [&](Communicator& c) -> Task<> {
    const int next = (c.rank() + 1) % c.world_size();
    const int before = (c.rank() + c.world_size() - 1) % c.world_size();
    const auto first = pattern(10, c.rank());
    const auto second = pattern(1'500'000, c.rank() + 50);
    std::vector<std::byte> a(first.size());
    std::vector<std::byte> b(second.size());
    Task<> sent_first = c.send(first, next);
    Task<> sent_second = c.send(second, next);
    co_await c.recv(a, before);
    co_await c.recv(b, before);
    EXPECT_TRUE(a == pattern(10, before) && b == pattern(1'500'000, before + 50));
    co_await std::move(sent_first);
    co_await std::move(sent_second);
  };
  on_every_rank(body);
}

TEST_P(CommunicatorConformance, a_send_that_nobody_receives_is_heard_of_once) {
  if (world() == 1) GTEST_SKIP() << "one rank has nobody to send to";
  const OnRank body = [&](Communicator& c) -> Task<> {
    const int next = (c.rank() + 1) % c.world_size();
    const int before = (c.rank() + c.world_size() - 1) % c.world_size();
    const auto sent = pattern(700, c.rank());
    std::vector<std::byte> came(sent.size());
    std::vector<int> heard;
    Task<> first = c.send(sent, next);
    co_await c.barrier();  // what was sent before it has come
    c.on_send([&heard](int from) { heard.push_back(from); });
    EXPECT_THAT(heard, ::testing::ElementsAre(before)) << "it was there already";
    co_await c.barrier();
    Task<> second = c.send(sent, next);
    co_await c.barrier();
    EXPECT_THAT(heard, ::testing::ElementsAre(before, before));
    co_await c.recv(came, before);
    EXPECT_TRUE(came == pattern(700, before));
    co_await c.recv(came, before);
    Task<> awaited = c.recv(came, before);
    co_await c.barrier();
    co_await c.send(sent, next);
    co_await std::move(awaited);
    EXPECT_EQ(heard.size(), 2U) << "somebody was waiting for it";
    c.on_send({});
    co_await c.barrier();
    Task<> last = c.send(sent, next);
    co_await c.barrier();
    co_await c.recv(came, before);
    EXPECT_EQ(heard.size(), 2U) << "nobody hears any more";
    co_await std::move(first);
    co_await std::move(second);
    co_await std::move(last);
  };
  on_every_rank(body);
}

TEST_P(CommunicatorConformance, calls_may_be_under_way_together_and_end_in_any_order) {
  const OnRank body = [&](Communicator& c) -> Task<> {
    const auto mine = pattern(1'200'000, c.rank());
    std::vector<std::byte> all(mine.size() * world());
    std::vector<float> values(300'000, 1.0f);
    std::vector<std::uint64_t> one{1};
    Task<> gathered = c.all_gather(mine, all);
    Task<> reduced = c.all_reduce(std::as_writable_bytes(std::span(values)), DType::kFloat32);
    Task<> counted = c.all_reduce(std::span(one), Communicator::Op::kSum);
    co_await std::move(counted);
    EXPECT_EQ(one[0], world());
    co_await std::move(reduced);
    EXPECT_TRUE(
        std::ranges::all_of(values, [&](float x) { return x == static_cast<float>(world()); }));
    co_await std::move(gathered);
    for (std::size_t r = 0; r < world(); ++r) {
      const auto expected = pattern(mine.size(), static_cast<int>(r));
      EXPECT_EQ(std::memcmp(all.data() + r * mine.size(), expected.data(), mine.size()), 0);
    }
  };
  on_every_rank(body);
}

// Each communicator has an order of its own; between two of them ranks may differ.
TEST_P(CommunicatorConformance, split_communicators_do_not_wait_for_each_other) {
  const OnRank body = [&](Communicator& c) -> Task<> {
    std::vector<int> everyone;
    for (int r = 0; r < c.world_size(); ++r) everyone.push_back(r);
    const auto first = c.split(everyone);
    const auto second = c.split(everyone);
    const std::vector<std::byte> mine = pattern(900'000, c.rank());
    std::vector<std::byte> a(mine.size() * world());
    std::vector<std::byte> b(a.size());
    Communicator& early = c.rank() % 2 == 0 ? *first : *second;
    Communicator& late = c.rank() % 2 == 0 ? *second : *first;
    Task<> one = early.all_gather(mine, a);
    Task<> other = late.all_gather(mine, b);
    if (c.rank() % 2 == 0) {
      co_await std::move(one);
      co_await std::move(other);
    } else {
      co_await std::move(other);
      co_await std::move(one);
    }
    EXPECT_TRUE(a == b);
  };
  on_every_rank(body);
}

TEST_P(CommunicatorConformance, split_numbers_its_members_from_zero) {
  const OnRank body = [&](Communicator& c) -> Task<> {
    std::vector<int> members;  // of this rank's parity
    for (int r = c.rank() % 2; r < c.world_size(); r += 2) members.push_back(r);
    const auto part = c.split(members);
    EXPECT_EQ(part->world_size(), static_cast<int>(members.size()));
    EXPECT_EQ(members[static_cast<std::size_t>(part->rank())], c.rank());
    std::vector<std::uint64_t> sum{static_cast<std::uint64_t>(c.rank())};
    co_await part->all_reduce(std::span(sum), Communicator::Op::kSum);
    std::uint64_t expected = 0;
    for (const int member : members) expected += static_cast<std::uint64_t>(member);
    EXPECT_EQ(sum[0], expected);
  };
  on_every_rank(body);
}

// A rank sends each other rank that one's slice once, by direct exchange or around a ring.
TEST_P(CommunicatorConformance, traffic_counts_the_payload_that_left_this_rank) {
  constexpr std::size_t kBytes = 1 << 20;
  const OnRank body = [&](Communicator& c) -> Task<> {
    std::vector<std::byte> slice(kBytes);
    std::vector<std::byte> all(kBytes * world());
    const auto payload = [&] {
      const Traffic traffic = c.traffic();
      return traffic.same_host.payload_bytes + traffic.other_hosts.payload_bytes;
    };
    co_await c.all_gather(slice, all);
    EXPECT_EQ(payload(), (world() - 1) * kBytes);
    co_await c.reduce_scatter(all, slice, DType::kFloat32);
    EXPECT_EQ(payload(), 2 * (world() - 1) * kBytes);
    co_await c.all_reduce(all, DType::kFloat32);
    EXPECT_EQ(payload(), 4 * (world() - 1) * kBytes);
    EXPECT_EQ(c.traffic().waited.size(), world());
  };
  on_every_rank(body);
}

TEST_P(CommunicatorConformance, all_reduce_of_doubles_sums_in_rank_order) {
  const auto value = [](std::size_t rank) { return 0.1 + 1e16 * (rank == 1 ? 1.0 : 0.0); };
  const OnRank body = [&](Communicator& c) -> Task<> {
    std::vector<double> values{value(static_cast<std::size_t>(c.rank()))};
    co_await c.all_reduce(std::span(values), Communicator::Op::kSum);
    double sum = value(0);
    for (std::size_t r = 1; r < world(); ++r) sum += value(r);
    EXPECT_EQ(std::bit_cast<std::uint64_t>(values[0]), std::bit_cast<std::uint64_t>(sum));
  };
  on_every_rank(body);
}

TEST_P(CommunicatorConformance, all_reduce_of_integers_sums_and_finds_both_ends) {
  const std::uint64_t ranks = world();
  const OnRank body = [&](Communicator& c) -> Task<> {
    const auto mine = static_cast<std::uint64_t>(c.rank()) + 10;
    std::vector<std::uint64_t> values{mine};
    co_await c.all_reduce(std::span(values), Communicator::Op::kMin);
    EXPECT_EQ(values[0], 10u);
    values = {mine};
    co_await c.all_reduce(std::span(values), Communicator::Op::kMax);
    EXPECT_EQ(values[0], 9 + ranks);
    values = {mine};
    co_await c.all_reduce(std::span(values), Communicator::Op::kSum);
    EXPECT_EQ(values[0], 10 * ranks + ranks * (ranks - 1) / 2);
  };
  on_every_rank(body);
}

TEST_P(CommunicatorConformance, nobody_leaves_a_barrier_before_all_have_come) {
  if (ranks_.size() < world()) GTEST_SKIP() << "the count of who has come is in one process";
  std::size_t arrived = 0;
  const OnRank body = [&](Communicator& c) -> Task<> {
    ++arrived;
    co_await c.barrier();
    EXPECT_EQ(arrived, world());
  };
  on_every_rank(body);
}

TEST_P(CommunicatorConformance, shapes_that_do_not_fit_are_refused) {
  const auto refused = [&](const OnRank& body) {
    try {
      on_every_rank(body);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    }
  };
  std::vector<std::byte> five(5);
  std::vector<std::byte> output(5 * world() + 1);
  refused([&](Communicator& c) { return c.all_gather(five, output); });
  refused([&](Communicator& c) { return c.reduce_scatter(output, five, DType::kFloat32); });
}

TEST_P(CommunicatorConformance, abort_fails_every_later_call_with_its_reason) {
  if (ranks_[0]->rank() == 0) ranks_[0]->abort("rank 0 ran out of disk");
  std::vector<std::byte> bytes(4);
  std::vector<std::byte> all(4 * world());
  std::vector<double> doubles(1);
  std::vector<std::uint64_t> integers(1);
  const std::vector<OnRank> calls = {
      [&](Communicator& c) { return c.all_gather(bytes, all); },
      [&](Communicator& c) { return c.reduce_scatter(all, bytes, DType::kFloat32); },
      [&](Communicator& c) { return c.all_reduce(std::span(doubles), Communicator::Op::kSum); },
      [&](Communicator& c) { return c.all_reduce(std::span(integers), Communicator::Op::kMin); },
      [&](Communicator& c) { return c.all_reduce(all, DType::kFloat32); },
      [&](Communicator& c) { return c.all_to_all(all, all); },
      [&](Communicator& c) { return c.barrier(); }};
  for (const OnRank& call : calls) {
    for (const auto& rank : ranks_) {
      try {
        reactor_.block_on(call(*rank));
        ADD_FAILURE() << "the call went through";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
        EXPECT_THAT(error.what(), testing::HasSubstr("rank 0 ran out of disk"));
      }
    }
  }
}

// TCP, MPI and simulated ranks all notice calls that do not match.
TEST_P(CommunicatorConformance, different_calls_fail_on_every_rank_and_name_both) {
  if (world() == 1) GTEST_SKIP() << "one rank agrees with itself";
  std::vector<std::byte> bytes(4 * world());
  std::vector<std::byte> received(bytes.size());
  std::size_t raised = 0;
  const OnRank body = [&](Communicator& c) -> Task<> {
    try {
      if (c.rank() == 0) {
        co_await c.all_to_all(bytes, received);
      } else {
        co_await c.all_reduce(bytes, DType::kFloat32);
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
      EXPECT_THAT(error.what(), testing::HasSubstr("all_to_all"));
      EXPECT_THAT(error.what(), testing::HasSubstr("all_reduce"));
      ++raised;
    }
  };
  on_every_rank(body);
  EXPECT_EQ(raised, ranks_.size());
}

INSTANTIATE_TEST_SUITE_P(launched, CommunicatorConformance, testing::ValuesIn(launched_backends()),
                         [](const auto& backend) {
                           return std::string(backend.param.name) +
                                  std::to_string(backend.param.world_size);
                         });
INSTANTIATE_TEST_SUITE_P(backends, CommunicatorConformance, testing::ValuesIn(kBackends),
                         [](const auto& backend) {
                           return std::string(backend.param.name) +
                                  std::to_string(backend.param.world_size);
                         });

}  // namespace
}  // namespace ziggurat
