// SPDX-License-Identifier: Apache-2.0
// tests/collectives/tcp/tcp_faults_test.cc: calls that do not match, frames that were damaged: an
// error on every rank, never a hang and never wrong data.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <boost/asio/write.hpp>
#include <cstring>
#include <functional>
#include <future>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/runtime/async.h"
#include "base/runtime/for_each.h"
#include "base/runtime/worker_pool.h"
#include "collectives/exchange/exchange_communicator.h"
#include "collectives/exchange/frame.h"
#include "collectives/exchange/frame_seal.h"
#include "tests/collectives/tcp_ranks.h"

namespace ziggurat {
namespace tcp_faults_test {

using ::testing::HasSubstr;

using OnRank = std::function<Task<>(Communicator&)>;

struct Failure {
  bool failed = false;
  ErrorCode code{};
  std::string text;
};

class TcpFaults : public ::testing::Test {
 protected:
  std::vector<std::unique_ptr<Communicator>> connect(std::size_t world,
                                                     Nanoseconds timeout = std::chrono::minutes(10),
                                                     WorkerPool* workers_of_last = nullptr) {
    std::vector<std::unique_ptr<Communicator>> ranks;
    for (TcpOptions& options : connected_options(std::vector<Reactor*>(world, &reactor_))) {
      options.timeout = timeout;
      const bool last = workers_of_last != nullptr && ranks.size() + 1 == world;
      ranks.push_back(std::make_unique<ExchangeCommunicator>(
          ExchangeTransport::create(reactor_, last ? *workers_of_last : workers_,
                                    over_sockets(reactor_, std::move(options)))));
    }
    return ranks;
  }

  /// Every rank makes its own call at the same time; returns what each got for it.
  std::vector<Failure> call(const std::vector<std::unique_ptr<Communicator>>& ranks,
                            const std::vector<OnRank>& calls) {
    std::vector<Failure> failures(ranks.size());
    const std::function<Task<>(std::size_t)> one = [&](std::size_t i) -> Task<> {
      try {
        co_await calls[i](*ranks[i]);
      } catch (const Error& error) {
        failures[i] = {true, error.code(), error.what()};
      }
    };
    reactor_.block_on(for_each_index(reactor_, ranks.size(), ranks.size(), one));
    return failures;
  }

  Reactor reactor_;
  WorkerPool workers_{{.threads = 1, .cpus = {}}};
};

struct Buffers {
  std::vector<std::byte> in = std::vector<std::byte>(600'000);
  std::vector<std::byte> out = std::vector<std::byte>(600'000);
  std::vector<double> doubles = std::vector<double>(64);
  std::vector<std::uint64_t> integers = std::vector<std::uint64_t>(64);
};
/// A call that differs from that of every other number, in kind, count, type or operation.
OnRank numbered_call(std::size_t number, Buffers& b) {
  using Op = Communicator::Op;
  const std::size_t count = 4 * (1 + number / 16 * 1000);
  switch (number % 16) {
    case 0:
      return [=, &b](Communicator& c) {
        const auto n = count * static_cast<std::size_t>(c.world_size());
        return c.all_gather(std::span(b.in).first(count), std::span(b.out).first(n));
      };
    case 1:
    case 2:
      return [=, &b](Communicator& c) {
        const auto n = count * static_cast<std::size_t>(c.world_size());
        return c.reduce_scatter(std::span(b.in).first(n), std::span(b.out).first(count),
                                number % 16 == 1 ? DType::kFloat32 : DType::kBFloat16);
      };
    case 3:
    case 4:
      return [=, &b](Communicator& c) {
        return c.all_reduce(std::span(b.out).first(count),
                            number % 16 == 3 ? DType::kFloat16 : DType::kBFloat16);
      };
    case 5:
    case 6:
    case 7:
      return [=, &b](Communicator& c) {
        constexpr Op kOps[] = {Op::kSum, Op::kMin, Op::kMax};
        return c.all_reduce(std::span(b.doubles).first(1 + number / 16), kOps[number % 16 - 5]);
      };
    case 8:
    case 9:
      return [=, &b](Communicator& c) {
        return c.all_reduce(std::span(b.integers).first(1 + number / 16),
                            number % 16 == 8 ? Op::kMin : Op::kMax);
      };
    case 10:
    case 11:
    case 12:
    case 13:
    case 14:
      return [=, &b](Communicator& c) {
        const auto n = count * static_cast<std::size_t>(c.world_size());
        return c.all_to_all(std::span(b.in).first(n * (number % 16 - 9)),
                            std::span(b.out).first(n * (number % 16 - 9)));
      };
    default: return [](Communicator& c) { return c.barrier(); };
  }
}

TEST_F(TcpFaults, TwoHundredMismatchedCallsFailOnEveryRankAndNameBoth) {
  std::mt19937 random(7);
  std::vector<Buffers> buffers(3);
  for (int i = 0; i < 200; ++i) {
    const auto ranks = connect(3);
    const std::size_t right = random() % 95;  // the last barrier is the first one again
    std::size_t wrong = random() % 95;
    while (wrong == right || (right % 16 == 15 && wrong % 16 == 15)) wrong = random() % 95;
    const std::size_t odd = random() % 3;
    std::vector<OnRank> calls;
    for (std::size_t r = 0; r < 3; ++r) {
      calls.push_back(numbered_call(r == odd ? wrong : right, buffers[r]));
    }
    for (const Failure& failure : call(ranks, calls)) {
      EXPECT_TRUE(failure.failed) << right << " and " << wrong;
      EXPECT_EQ(failure.code, ErrorCode::kInvalidArgument) << failure.text;
      EXPECT_THAT(failure.text, HasSubstr("ranks made different calls: rank "));
      EXPECT_THAT(failure.text, HasSubstr(fmt::format("rank {} ", odd)));
    }
  }
}

TEST_F(TcpFaults, SendsAndReceivesMustFitToo) {
  const auto ranks = connect(2);
  std::vector<std::byte> five(5);
  std::vector<std::byte> six(6);
  const auto failures = call(ranks, {[&](Communicator& c) { return c.send(five, 1); },
                                     [&](Communicator& c) { return c.recv(six, 0); }});
  for (const Failure& failure : failures) {
    EXPECT_EQ(failure.code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(failure.text, HasSubstr("send of 5 bytes"));
    EXPECT_THAT(failure.text, HasSubstr("recv of 6 bytes"));
  }
}

TEST_F(TcpFaults, ACallThatCannotBeEndsTheWaitOfTheOthers) {
  const auto ranks = connect(2);
  std::vector<std::byte> five(5);
  std::vector<std::byte> ten(10);
  const auto failures = call(ranks, {[&](Communicator& c) { return c.all_gather(five, five); },
                                     [&](Communicator& c) { return c.all_gather(five, ten); }});
  for (const Failure& failure : failures) {
    EXPECT_EQ(failure.code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(failure.text,
                HasSubstr("all_gather: the input has 5 bytes and the output 5 on 2 ranks"));
  }
}

TEST_F(TcpFaults, ARankThatDoesNotComeIsNamedWithTheCallAndTheWait) {
  const auto ranks = connect(3, std::chrono::milliseconds(200));
  std::vector<std::byte> values(400'000);
  const OnRank reduce = [&](Communicator& c) -> Task<> {
    std::vector<std::byte> own(values);
    co_await c.all_reduce(own, DType::kFloat32);
  };
  const OnRank absent = [](Communicator&) -> Task<> { co_return; };
  const auto failures = call(ranks, {reduce, reduce, absent});
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(failures[r].code, ErrorCode::kDeadlineExceeded) << failures[r].text;
    EXPECT_THAT(failures[r].text,
                HasSubstr("all_reduce of 100000 fp32 (call 0 of ranks 0, 1, 2) has waited 0."));
    EXPECT_THAT(failures[r].text, HasSubstr("s for rank 2"));
  }
}

TEST_F(TcpFaults, ARankThatLeftIsNamed) {
  auto ranks = connect(3);
  ranks[1].reset();
  const OnRank barrier = [](Communicator& c) { return c.barrier(); };
  std::vector<std::unique_ptr<Communicator>> rest;
  rest.push_back(std::move(ranks[0]));
  rest.push_back(std::move(ranks[2]));
  for (const Failure& failure : call(rest, {barrier, barrier})) {
    EXPECT_EQ(failure.code, ErrorCode::kUnavailable);
    EXPECT_THAT(failure.text, HasSubstr("rank 1 has left"));
  }
}

/// What rank 1 sends rank 0 in an all_gather of `bytes`: frames for each socket.
struct Script {
  std::vector<std::byte> control;
  std::vector<std::byte> bulk;
};
/// `payloads` seals what they carry; `control` and `bulk` seal the headers of each socket.
struct Seals {
  wire::PayloadSeal payloads;
  wire::HeaderSeal control{kTestEpoch};
  wire::HeaderSeal bulk{kTestEpoch};
};
Script script_of(std::span<const std::byte> bytes, Seals seals = {}) {
  const CallSpec spec{.kind = CallKind::kAllGather, .count = bytes.size()};
  Script script;
  std::uint64_t number = 0;
  const auto add = [&](std::vector<std::byte>& to, wire::FrameHeader header,
                       std::span<const std::byte> payload) {
    header.length = payload.size();
    header.payload = seals.payloads.mark(number++, payload, header.key(), header.offset);
    (&to == &script.control ? seals.control : seals.bulk).seal(header);
    const auto raw = std::as_bytes(std::span(&header, 1));
    to.insert(to.end(), raw.begin(), raw.end());
    to.insert(to.end(), payload.begin(), payload.end());
  };
  const bool small = bytes.size() <= wire::kEagerBytes;
  add(script.control, wire::make_header(wire::FrameKind::kCall, 1, {}, spec),
      small ? bytes : std::span<const std::byte>());
  for (std::size_t offset = 0; !small && offset < bytes.size(); offset += wire::kChunkBytes) {
    auto header = wire::make_header(wire::FrameKind::kChunk, 1, {}, spec);
    header.offset = offset;
    add(script.bulk, header,
        bytes.subspan(offset, std::min(wire::kChunkBytes, bytes.size() - offset)));
  }
  return script;
}

/// Damages a script: bits flip, bytes are lost, doubled, put in or moved.
void mutate(std::vector<std::byte>& bytes, std::mt19937& random) {
  const auto at = [&] { return static_cast<std::ptrdiff_t>(random() % bytes.size()); };
  const auto some = [&](std::ptrdiff_t from) {
    const std::ptrdiff_t left = static_cast<std::ptrdiff_t>(bytes.size()) - from;
    return 1 + static_cast<std::ptrdiff_t>(random()) % std::min<std::ptrdiff_t>(left, 90);
  };
  const std::ptrdiff_t i = at();
  switch (random() % 5) {
    case 0: bytes[static_cast<std::size_t>(i)] ^= std::byte{1} << (random() % 8); break;
    case 1: bytes.erase(bytes.begin() + i, bytes.begin() + i + some(i)); break;
    case 2: {
      const std::vector<std::byte> copy(bytes.begin() + i, bytes.begin() + i + some(i));
      bytes.insert(bytes.begin() + i, copy.begin(), copy.end());
      break;
    }
    case 3: bytes.insert(bytes.begin() + i, std::byte(random())); break;
    default: std::rotate(bytes.begin(), bytes.begin() + i, bytes.end()); break;
  }
}

TEST_F(TcpFaults, TwentyThousandDamagedStreamsGiveAnErrorOrTheRightBytes) {
  std::mt19937 random(23);
  std::vector<std::byte> right(20'000);
  for (std::byte& b : right) b = static_cast<std::byte>(random());
  std::size_t refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    const auto sent = std::span<const std::byte>(right).first(i % 8 == 0 ? right.size() : 48);
    Script script = script_of(sent);
    const bool whole = i % 40 == 0;
    if (!whole) {
      mutate(script.bulk.empty() || random() % 4 == 0 ? script.control : script.bulk, random);
    }
    std::vector<TcpOptions> both = connected_options({&reactor_, &reactor_});
    const auto control = std::move(both[1].peers[0].control);
    const auto bulk = std::move(both[1].peers[0].bulk);
    auto rank = std::make_unique<ExchangeCommunicator>(
        ExchangeTransport::create(reactor_, workers_, over_sockets(reactor_, std::move(both[0]))));
    boost::system::error_code error;
    boost::asio::write(*control, boost::asio::buffer(script.control), error);
    boost::asio::write(*bulk, boost::asio::buffer(script.bulk), error);
    // A reset after the data: 80,000 sockets that linger would cost minutes.
    for (TcpSocket* socket : {bulk.get(), control.get()}) {
      socket->set_option(boost::asio::socket_base::linger(true, 0));
      socket->close();
    }
    std::vector<std::byte> all(2 * sent.size());
    std::vector<std::unique_ptr<Communicator>> ranks;
    ranks.push_back(std::move(rank));
    const auto gather = [&](Communicator& c) { return c.all_gather(sent, all); };
    const Failure failure = call(ranks, {gather})[0];
    refused += failure.failed;
    if (whole || !failure.failed) {
      ASSERT_EQ(std::memcmp(all.data() + sent.size(), sent.data(), sent.size()), 0)
          << i << ' ' << failure.text;
    }
  }
  EXPECT_GT(refused, 15'000u) << "most damage was not even noticed";
}

/// Rank 0 of two hosts, which gets from the network what a script says instead of rank 1.
class ForgedFrames : public TcpFaults {
 protected:
  static constexpr std::size_t kBytes = 20'000;  // announced on control, sent on bulk

  ForgedFrames() : sent_(kBytes, std::byte{7}) {
    std::vector<TcpOptions> both = connected_options({&reactor_, &reactor_}, 1);
    both[0].peers[1].memory = both[1].peers[0].memory = {};
    keys_of_rank_1_ = both[1];
    control_ = std::move(both[1].peers[0].control);
    bulk_ = std::move(both[1].peers[0].bulk);
    rank_0_.push_back(std::make_unique<ExchangeCommunicator>(
        ExchangeTransport::create(reactor_, workers_, over_sockets(reactor_, std::move(both[0])))));
  }
  /// What rank 1 itself would seal them with.
  Seals right() const {
    const Keys::Peer& to_rank_0 = keys_of_rank_1_.peers[0];
    return {wire::PayloadSeal(keys_of_rank_1_.peers[1].payload_key),
            wire::HeaderSeal(kTestEpoch, to_rank_0.control_keys),
            wire::HeaderSeal(kTestEpoch, to_rank_0.bulk_keys)};
  }
  Failure receive(const Script& script) {
    boost::asio::write(*control_, boost::asio::buffer(script.control));
    boost::asio::write(*bulk_, boost::asio::buffer(script.bulk));
    const auto gather = [&](Communicator& c) { return c.all_gather(sent_, all_); };
    return call(rank_0_, {gather})[0];
  }

  /// Copies keys only.
  struct Keys {
    struct Peer {
      std::optional<wire::SealKey> payload_key;
      std::optional<wire::ConnectionKeys> control_keys, bulk_keys;
    };
    std::vector<Peer> peers;
    Keys& operator=(const TcpOptions& options) {
      for (const TcpPeer& peer : options.peers)
        peers.push_back({peer.payload_key, peer.control_keys, peer.bulk_keys});
      return *this;
    }
  };
  Keys keys_of_rank_1_;
  std::unique_ptr<TcpSocket> control_, bulk_;
  std::vector<std::unique_ptr<Communicator>> rank_0_;
  std::vector<std::byte> sent_;
  std::vector<std::byte> all_ = std::vector<std::byte>(2 * kBytes);
};

TEST_F(ForgedFrames, OfTheRankItselfAreTaken) {
  // The call is done, so only rank 0's goodbye is left: it says nothing that could be answered.
  EXPECT_FALSE(receive(script_of(sent_, right())).failed);
  EXPECT_EQ(all_.back(), std::byte{7});
}

TEST_F(ForgedFrames, WithChecksumsOnlyAreRefused) {
  const Failure failure = receive(script_of(sent_));
  EXPECT_EQ(failure.code, ErrorCode::kUnavailable);
  EXPECT_THAT(failure.text, HasSubstr("rank 1 sent a frame whose header has a wrong tag"));
}

TEST_F(ForgedFrames, WithAnotherPayloadAreRefused) {
  Script script = script_of(sent_, right());
  script.bulk.back() ^= std::byte{1};
  EXPECT_THAT(receive(script).text, HasSubstr("fail their checksum"));
}

TEST_F(ForgedFrames, ThatComeTwiceAreRefused) {
  Script script = script_of(sent_, right());
  const std::vector<std::byte> once = script.control;
  script.control.insert(script.control.end(), once.begin(), once.end());
  script.bulk.clear();  // or the call could be over by then
  EXPECT_THAT(receive(script).text, HasSubstr("wrong tag"));
}

// Rank 0's own frames, sent back to it.
TEST_F(ForgedFrames, OfTheOtherDirectionAreRefused) {
  Seals reflected = right();
  auto keys = *keys_of_rank_1_.peers[0].control_keys;
  std::swap(keys.send, keys.receive);
  reflected.control = wire::HeaderSeal(kTestEpoch, keys);
  EXPECT_THAT(receive(script_of(sent_, std::move(reflected))).text, HasSubstr("wrong tag"));
}

// Each is a whole frame, sealed for its connection.
TEST_F(ForgedFrames, OfTheOtherConnectionAreRefused) {
  Seals crossed = right();
  std::swap(crossed.control, crossed.bulk);
  EXPECT_THAT(receive(script_of(sent_, std::move(crossed))).text, HasSubstr("wrong tag"));
}

// A rank that stops has given what it had to give to a call that it has ended: what the others have
// left to do is work of their own. Rank 1's worker is held until it knows that rank 0 has stopped.
TEST_F(TcpFaults, ACallThatHasEverythingEndsWellThoughAnotherRankHasStoppedSince) {
  WorkerPool slow({.threads = 1, .cpus = {}});
  std::promise<void> release;
  slow.submit("held", [released = release.get_future().share()] { released.wait(); });
  const auto ranks = connect(2, std::chrono::minutes(10), &slow);
  std::vector<std::uint64_t> values{1, 2};
  const OnRank stops = [&](Communicator& c) -> Task<> {
    co_await c.all_reduce(std::span(values).first(1), Communicator::Op::kMax);
    c.abort("that was all");
  };
  const OnRank finishes = [&](Communicator& c) {
    return c.all_reduce(std::span(values).last(1), Communicator::Op::kMax);
  };
  const OnRank learns = [&](Communicator& c) -> Task<> {
    std::string text;
    try {
      co_await c.barrier();
    } catch (const Error& error) {
      text = error.what();
    }
    EXPECT_THAT(text, HasSubstr("that was all"));
    release.set_value();
  };
  const std::array calls{stops, finishes, learns};
  std::array<Failure, 3> failures;
  const std::function<Task<>(std::size_t)> one = [&](std::size_t i) -> Task<> {
    try {
      co_await calls[i](*ranks[std::min<std::size_t>(i, 1)]);
    } catch (const Error& error) {
      failures[i] = {true, error.code(), error.what()};
    }
  };
  reactor_.block_on(for_each_index(reactor_, 3, 3, one));
  for (const Failure& failure : failures) EXPECT_FALSE(failure.failed) << failure.text;
  EXPECT_EQ(values, (std::vector<std::uint64_t>{2, 2}));
}

// Waiting for minutes is fine as long as some rank finishes work: here five times the timeout.
TEST_F(TcpFaults, ARankAtWorkIsWaitedForLongerThanTheTimeout) {
  const auto ranks = connect(2, std::chrono::milliseconds(400));
  const OnRank waits = [](Communicator& c) { return c.barrier(); };
  const OnRank works = [this](Communicator& c) -> Task<> {
    const std::function<void()> piece = [] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    };
    for (int i = 0; i < 100; ++i) co_await workers_.run(reactor_, {"a piece of work", 0}, piece);
    co_await c.barrier();
  };
  for (const Failure& failure : call(ranks, {waits, works})) {
    EXPECT_FALSE(failure.failed) << failure.text;
  }
}

// Each waits for the other, in a call that the other does not make: both are alive, neither works.
TEST_F(TcpFaults, RanksThatWaitForEachOtherInDifferentCommunicatorsAreEndedAndBothCallsNamed) {
  const auto ranks = connect(2, std::chrono::milliseconds(400));
  const std::vector<int> all{0, 1};
  std::vector<std::unique_ptr<Communicator>> ones(2);
  const auto crossed = [&](bool first) {
    return [&ones, &all, first](Communicator& c) -> Task<> {
      auto& own = ones[static_cast<std::size_t>(c.rank())];
      own = c.split(all);
      co_await (first ? c : *own).barrier();
    };
  };
  for (const Failure& failure : call(ranks, {crossed(true), crossed(false)})) {
    EXPECT_EQ(failure.code, ErrorCode::kDeadlineExceeded) << failure.text;
    EXPECT_THAT(failure.text, HasSubstr("barrier (call 0 of ranks 0, 1) has waited"));
  }
}

TEST(PayloadSeal, OfChecksumsFitsItsCallAndItsPlaceAlone) {
  const wire::PayloadSeal seal;
  const std::vector<std::byte> payload(64, std::byte{7});
  const wire::CallKey call{.communicator = 1, .sequence = 2};
  const wire::PayloadMark mark = seal.mark(0, payload, call, 4096);
  EXPECT_TRUE(seal.matches(mark, payload, call, 4096));
  EXPECT_FALSE(seal.matches(mark, payload, call, 0));
  EXPECT_FALSE(seal.matches(mark, payload, {.communicator = 1, .sequence = 3}, 4096));
  EXPECT_FALSE(seal.matches(mark, payload, {.communicator = 2, .sequence = 2}, 4096));
  EXPECT_FALSE(seal.matches(mark, std::span(payload).first(63), call, 4096));
}

}  // namespace tcp_faults_test
}  // namespace ziggurat
