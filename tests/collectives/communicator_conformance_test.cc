// SPDX-License-Identifier: Apache-2.0
// tests/collectives/communicator_conformance_test.cc: what every Communicator promises, run on
// every back-end.
//
// A back-end is a row of kBackends: a name, a number of ranks and a factory for them on one
// reactor. Each case runs the same coroutine on every rank at once.
#include <gmock/gmock.h>

#include <bit>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "base/error.h"
#include "base/runtime/async.h"
#include "collectives/self_communicator.h"

namespace ziggurat {
namespace {

using Ranks = std::vector<std::unique_ptr<Communicator>>;

struct Backend {
  const char* name;
  int world_size;
  std::function<Ranks(Reactor& reactor, int world_size)> create;
};

Ranks create_self(Reactor&, int) {
  Ranks ranks;
  ranks.push_back(std::make_unique<SelfCommunicator>());
  return ranks;
}

const Backend kBackends[] = {{"self", 1, create_self}};

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

  Reactor reactor_;
  Ranks ranks_ = GetParam().create(reactor_, GetParam().world_size);
};

TEST_P(CommunicatorConformance, ranks_are_numbered_from_zero) {
  ASSERT_EQ(ranks_.size(), world());
  for (std::size_t i = 0; i < world(); ++i) {
    EXPECT_EQ(ranks_[i]->rank(), static_cast<int>(i));
    EXPECT_EQ(ranks_[i]->world_size(), GetParam().world_size);
  }
}

TEST_P(CommunicatorConformance, all_gather_puts_each_ranks_bytes_in_its_slice) {
  for (const std::size_t n : {0u, 1u, 7u, 4096u, 65537u}) {
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

TEST_P(CommunicatorConformance, broadcast_gives_the_roots_bytes_to_all) {
  for (int root = 0; root < GetParam().world_size; ++root) {
    const OnRank body = [&](Communicator& c) -> Task<> {
      auto bytes = pattern(777, c.rank());
      co_await c.broadcast(bytes, root);
      EXPECT_EQ(bytes, pattern(777, root));
    };
    on_every_rank(body);
  }
}

TEST_P(CommunicatorConformance, nobody_leaves_a_barrier_before_all_have_come) {
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
  refused([&](Communicator& c) { return c.broadcast(five, c.world_size()); });
}

TEST_P(CommunicatorConformance, abort_fails_every_later_call_with_its_reason) {
  ranks_[0]->abort("rank 0 ran out of disk");
  std::vector<std::byte> bytes(4);
  std::vector<std::byte> all(4 * world());
  std::vector<double> doubles(1);
  std::vector<std::uint64_t> integers(1);
  const std::vector<OnRank> calls = {
      [&](Communicator& c) { return c.all_gather(bytes, all); },
      [&](Communicator& c) { return c.reduce_scatter(all, bytes, DType::kFloat32); },
      [&](Communicator& c) { return c.all_reduce(std::span(doubles), Communicator::Op::kSum); },
      [&](Communicator& c) { return c.all_reduce(std::span(integers), Communicator::Op::kMin); },
      [&](Communicator& c) { return c.broadcast(bytes, 0); },
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

INSTANTIATE_TEST_SUITE_P(backends, CommunicatorConformance, testing::ValuesIn(kBackends),
                         [](const auto& backend) {
                           return std::string(backend.param.name) +
                                  std::to_string(backend.param.world_size);
                         });

}  // namespace
}  // namespace ziggurat
