// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_memory_test.cc: work that waits takes no memory of its own: what a step and an
// open take beside the budget does not grow with the number of chunks.
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>

#include "tests/core/engine_harness.h"
#include "tests/support/sanitized.h"

#if defined(__GLIBC__) && !defined(ZIGGURAT_SANITIZED)
#define COUNTS_THE_HEAP 1
#endif

namespace {

/// Bytes of the heap in use, coroutines among them: Asio takes theirs from aligned_alloc().
std::atomic<std::int64_t> live_bytes{0};
std::atomic<std::int64_t> most_bytes{0};

}  // namespace

#ifdef COUNTS_THE_HEAP
extern "C" {
void* __libc_malloc(std::size_t);                 // NOLINT
void* __libc_calloc(std::size_t, std::size_t);    // NOLINT
void* __libc_realloc(void*, std::size_t);         // NOLINT
void* __libc_memalign(std::size_t, std::size_t);  // NOLINT
void __libc_free(void*);                          // NOLINT

static void* taken(void* memory) {
  const auto size = static_cast<std::int64_t>(::malloc_usable_size(memory));
  const std::int64_t now = live_bytes.fetch_add(size) + size;
  std::int64_t most = most_bytes.load();
  while (now > most && !most_bytes.compare_exchange_weak(most, now)) {
  }
  return memory;
}
static void given_back(void* memory) {
  live_bytes.fetch_sub(static_cast<std::int64_t>(::malloc_usable_size(memory)));
}

void* malloc(std::size_t size) { return taken(__libc_malloc(size)); }
void* calloc(std::size_t count, std::size_t size) { return taken(__libc_calloc(count, size)); }
void* realloc(void* memory, std::size_t size) {
  given_back(memory);
  return taken(__libc_realloc(memory, size));
}
void* aligned_alloc(std::size_t alignment, std::size_t size) {
  return taken(__libc_memalign(alignment, size));
}
int posix_memalign(void** memory, std::size_t alignment, std::size_t size) {
  *memory = taken(__libc_memalign(alignment, size));
  return *memory == nullptr ? ENOMEM : 0;
}
void free(void* memory) {
  given_back(memory);
  __libc_free(memory);
}
}
#endif

namespace ziggurat::testing {
namespace engine_memory_test {

constexpr std::uint64_t kChunksPerUnit = 8;

/// Units of eight tiles, which a budget of 4 MiB cuts into chunks of one.
ModelSpec model_of(std::uint64_t units) {
  ModelSpec model{.name = "long", .units = {}};
  for (std::uint64_t u = 0; u < units; ++u) {
    const std::string unit = "unit" + std::to_string(u);
    model.units.push_back(
        {.name = unit,
         .params = {{.name = unit + ".weight", .shape = {1000, 128}, .decay = true}}});
  }
  return model;
}

/// What `action` takes at its peak, beyond what was there before.
std::int64_t peak_of(const std::function<void()>& action) {
  const std::int64_t before = live_bytes;
  most_bytes = before;
  action();
  return most_bytes - before;
}

struct Peaks {
  std::int64_t create;
  std::int64_t step;
  std::int64_t open;
};

Peaks peaks_of(std::uint64_t units, EngineConfig::Speculation speculation) {
  const ScratchDirectory directory;
  const ModelSpec model = model_of(units);
  EngineConfig config = small_config(directory.path());
  config.placement = parse_placement("all=nvme");
  config.host_budget_bytes = 4 * kMiB;
  config.clip_norm = 1e6F;
  config.speculation = speculation;
  Peaks peaks{};
  std::optional<Rig> rig;
  peaks.create = peak_of([&] { rig.emplace(model, config); });
  train_step(*rig->engine, model, 0, 0.01F);  // what the first use of anything sets aside stays
  rig->engine->make_durable();
  peaks.step = peak_of([&] {
    train_step(*rig->engine, model, 1, 0.01F);
    rig->engine->make_durable();
  });
  rig.reset();
  peaks.open = peak_of([&] { rig.emplace(model, config); });
  EXPECT_EQ(rig->engine->generation(), 2U);
  return peaks;
}

class EngineMemory : public ::testing::TestWithParam<EngineConfig::Speculation> {};
INSTANTIATE_TEST_SUITE_P(Updates, EngineMemory,
                         ::testing::Values(EngineConfig::Speculation::kNever,
                                           EngineConfig::Speculation::kAlways),
                         [](const auto& update) {
                           return update.param == EngineConfig::Speculation::kNever ? "AfterTheStep"
                                                                                    : "Guessed";
                         });

// A chunk that waits in a coroutine takes 2 KiB and more. What is kept of each chunk for good (its
// place, its hash, whether it was updated) takes half of one.
TEST_P(EngineMemory, OfWaitingWorkDoesNotGrowWithTheNumberOfChunks) {
#ifndef COUNTS_THE_HEAP
  GTEST_SKIP() << "this allocator is not counted";
#endif
  constexpr std::uint64_t kFew = 6;
  constexpr std::uint64_t kMany = 30;
  const Peaks few = peaks_of(kFew, GetParam());
  const Peaks many = peaks_of(kMany, GetParam());
  const auto more = static_cast<std::int64_t>((kMany - kFew) * kChunksPerUnit);
  EXPECT_LT((many.step - few.step) / more, 512);
  EXPECT_LT((many.create - few.create) / more, 1024);
  EXPECT_LT((many.open - few.open) / more, 1024);
}

}  // namespace engine_memory_test
}  // namespace ziggurat::testing
