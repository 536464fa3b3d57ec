// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_cuda_wholes_test.cc: units of whole parameters that ranks bring to a GPU each,
// over the double of the CUDA runtime: the bits of plain arrays, whatever order the double runs its
// streams in, in as little host memory as there may be.
//
// ZIGGURAT_SEEDS: orders of streams that each run is tried with (1).
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <functional>
#include <random>
#include <string>

#include "base/memory_exhausted.h"
#include "tests/core/streamed_gpu.h"
#include "tests/core/wholes_world.h"
#include "tests/cuda_double/cuda_double.h"

namespace ziggurat::testing {
namespace lent_cuda_wholes_test {

using ::testing::IsEmpty;

struct Shape {
  const char* name;
  Tier params;
  int ranks;
  std::uint64_t device_bytes;
  int hpz = 0;
  bool quantized = false;
};
constexpr Shape kShapes[] = {{"2_ranks", Tier::kHost, 2, kTight},
                             {"2_ranks_nvme", Tier::kNvme, 2, kRoomy},
                             {"3_ranks_nvme", Tier::kNvme, 3, kTight},
                             {"2_ranks_quantized", Tier::kHost, 2, kTight, 0, true},
                             {"2_nodes_of_2_ranks", Tier::kNvme, 4, kRoomy, 2, true}};

CudaDevice& gpu_of(const WholesRank& rank) { return static_cast<CudaDevice&>(*rank.device); }

class LentWholesOnGpus : public ::testing::TestWithParam<Shape> {
 protected:
  /// Runs `body` on all ranks with several orders of streams, each on fresh machines.
  static void train(const std::function<void(WholesRank& rank)>& body,
                    std::uint64_t host_bytes = 0) {
    for (std::uint64_t seed = 1; seed <= number_of("ZIGGURAT_SEEDS", 1); ++seed) {
      SCOPED_TRACE(fmt::format("seed {}", seed));
      cuda_double::reset(seed, {.devices = GetParam().ranks});
      {
        WholesWorld world(GetParam().ranks, GetParam().params, GetParam().device_bytes);
        world.host_budget_bytes = host_bytes;
        world.change = [](int, EngineConfig& config, ModelSpec&) {
          config.strategy.hpz = GetParam().hpz;
        };
        if (GetParam().quantized) world.quantize_params();
        for (const std::unique_ptr<WholesRank>& rank : world.ranks) put_on_gpu(*rank);
        expect_none(world.run(body));
      }
      EXPECT_THAT(cuda_double::report(), IsEmpty());
      if (HasFailure()) return;
    }
  }
  /// Returns the least host memory in which each rank's engine opens.
  static std::uint64_t smallest_budget() {
    cuda_double::reset(1, {.devices = GetParam().ranks});
    const WholesWorld world(GetParam().ranks, GetParam().params);
    std::uint64_t most = 0;
    for (int rank = 0; rank < GetParam().ranks; ++rank) {
      EngineConfig config = world.config(rank);
      config.host_budget_bytes = 4096;
      const auto runtime = Runtime::create({.threads = 1, .trace_path = ""});
      WholesRank alone(rank, rank, GetParam().ranks);
      put_on_gpu(alone);
      try {
        alone.open(config, alone.model(), *runtime, kRoomy);
      } catch (const MemoryExhausted& error) {
        most = std::max(most, error.shortage().smallest_bytes);
      }
      alone.close();
    }
    return most;
  }
  static void put_on_gpu(WholesRank& rank) {
    rank.make_device = [number = rank.number](Reactor& reactor, std::uint64_t size_bytes) {
      return CudaDevice::create(reactor, {.index = number, .capacity_bytes = size_bytes});
    };
    rank.reach = [](std::byte* address, std::size_t size_bytes) {
      return cuda_double::device_bytes(address, size_bytes);
    };
  }
};

INSTANTIATE_TEST_SUITE_P(Worlds, LentWholesOnGpus, ::testing::ValuesIn(kShapes),
                         [](const auto& one) { return std::string(one.param.name); });

TEST_P(LentWholesOnGpus, AreBroughtInAnyOrderOnEachRank) {
  train([](WholesRank& rank) {
    std::minstd_rand random(static_cast<unsigned>(rank.number) + 1);
    const auto any = [&] { return static_cast<StreamedUnit>(random() % kWholeUnits); };
    for (int step = 0; step < 6; ++step) {
      for (unsigned n = random() % 6; n > 0; --n) {
        if (random() % 3 == 0) rank.engine->expect_units(std::vector<StreamedUnit>{any(), any()});
        rank.look(any(), random() % 3 == 0);
      }
      rank.step();
    }
    rank.look_at_all();
  });
}

// Nobody waits for a copy before the next unit is asked for.
TEST_P(LentWholesOnGpus, AreReadByStreams) {
  train([](WholesRank& rank) {
    constexpr std::size_t kEach = kMiB;
    constexpr StreamedUnit kLooks = 2 * kWholeUnits;
    GpuStreams streams(gpu_of(rank), kLooks * kWholes.size() * kEach, rank.number);
    for (int step = 0; step < 3; ++step) {
      const auto room_of = [&](StreamedUnit look, std::size_t w) {
        return streams.pinned((look * kWholes.size() + w) * kEach);
      };
      for (StreamedUnit look = 0; look < kLooks; ++look) {
        GpuStreams::One& stream = streams.next();
        rank.engine->acquire(look % kWholeUnits, *stream.ref);
        for (std::size_t w = 0; w < kWholes.size(); ++w) {
          if (kWholes[w].unit != look % kWholeUnits) continue;
          const DeviceSpan<std::byte> from = rank.engine->place(rank.whole(w)).bytes;
          GpuStreams::copy(stream, room_of(look, w), reinterpret_cast<void*>(from.address()),
                           from.size(), cudaMemcpyDeviceToHost);
        }
        rank.engine->release(look % kWholeUnits, *stream.ref);
      }
      streams.wait();
      for (StreamedUnit look = 0; look < kLooks; ++look) {
        for (std::size_t w = 0; w < kWholes.size(); ++w) {
          if (kWholes[w].unit != look % kWholeUnits) continue;
          const TypedArray expected = rank.used(w);
          EXPECT_TRUE(std::equal(expected.bytes.begin(), expected.bytes.end(), room_of(look, w)))
              << "'" << kWholes[w].name << "', look " << look << " after " << step << " steps";
        }
      }
      rank.step();
    }
  });
}

TEST_P(LentWholesOnGpus, AreWrittenByAllRanks) {
  std::barrier<> written(GetParam().ranks);
  train([&](WholesRank& rank) {
    for (int round = 0; round < 2; ++round) {
      for (std::size_t w = static_cast<std::size_t>(round); w < kWholes.size(); w += 2) {
        TypedArray values(kWholes[w].dtype, kWholes[w].count);
        for (std::size_t i = 0; i < values.count(); ++i)
          values.set(i, 0.5F + 0.125F * static_cast<float>(i % 64));
        written.arrive_and_wait();  // nobody looks at what some have written already
        rank.write(w, values);
        written.arrive_and_wait();
      }
      rank.look_at_all();
      rank.step();
      rank.look_at_all();
    }
  });
}

// A unit is put together in memory that is set aside for that.
TEST_P(LentWholesOnGpus, AreBroughtInAsLittleHostMemoryAsThereIs) {
  const std::uint64_t host_bytes = smallest_budget();
  ASSERT_GT(host_bytes, kStagedGathers * 800'000U);  // of the largest unit
  train(
      [](WholesRank& rank) {
        for (int step = 0; step < 2; ++step) {
          for (StreamedUnit n = 0; n < 2 * kWholeUnits; ++n)
            rank.look((n + static_cast<StreamedUnit>(rank.number)) % kWholeUnits);
          rank.step();
        }
      },
      host_bytes);
}

}  // namespace lent_cuda_wholes_test
}  // namespace ziggurat::testing
