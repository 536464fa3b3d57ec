// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/run.cc: see run.h.
#include "tests/cuda_double/ptx/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cfenv>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "tests/cuda_double/ptx/thread.h"
#include "tests/cuda_double/ptx/warps.h"

namespace ziggurat::cuda_double::ptx {
namespace {

constexpr std::uint64_t kTurn = 4096;

/// The embedder's modes (flush to zero, rounding) are not the kernel's.
class PlainFloats {
 public:
  PlainFloats() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~PlainFloats() { std::fesetenv(&before_); }
  PlainFloats(const PlainFloats&) = delete;
  PlainFloats& operator=(const PlainFloats&) = delete;

 private:
  std::fenv_t before_;
};

class Runner {
 public:
  Runner(const Kernel& kernel, const Launch& launch, GlobalMemory& memory)
      : kernel_(kernel),
        launch_(launch),
        random_(launch.seed),
        threads_(launch.block.x * launch.block.y * launch.block.z),
        registers_(threads_.size() * static_cast<std::size_t>(kernel.registers)),
        block_{kernel, memory, SharedMemory(kernel.shared_bytes + launch.shared_bytes),
               launch.parameters, std::vector<std::byte>(threads_.size() * kernel.local_bytes)} {
    // A register that nothing wrote holds anything.
    for (std::uint64_t& one : registers_) one = random_();
  }

  std::uint64_t run() {
    const PlainFloats plain;
    const std::uint64_t blocks = std::uint64_t{launch_.grid.x} * launch_.grid.y * launch_.grid.z;
    std::vector<std::uint64_t> order(blocks);
    std::iota(order.begin(), order.end(), std::uint64_t{0});
    std::shuffle(order.begin(), order.end(), random_);
    const bool fences = std::any_of(kernel_.code.begin(), kernel_.code.end(),
                                    [](const Instruction& i) { return i.is_fence; });
    if (fences) block_.global.trust_blocks();
    for (const std::uint64_t number : order) run_block(number);
    return executed_;
  }

 private:
  using State = Thread::State;

  void start(std::uint64_t number) {
    block_.shared.clear(random_());
    block_.global.begin_block();
    const auto x = static_cast<std::uint32_t>(number % launch_.grid.x);
    const auto y = static_cast<std::uint32_t>(number / launch_.grid.x % launch_.grid.y);
    const auto z = static_cast<std::uint32_t>(number / launch_.grid.x / launch_.grid.y);
    const dim3 size = launch_.block;
    for (std::uint32_t n = 0; n < threads_.size(); ++n) {
      std::uint64_t* registers =
          registers_.data() + n * static_cast<std::size_t>(kernel_.registers);
      threads_[n] = {registers, &block_, 0, n, 0, State::kReady, nullptr};
      const std::uint32_t lane = n % kWarp;
      const std::uint32_t below = (1u << lane) - 1;
      const std::uint32_t mine = 1u << lane;
      const std::uint64_t special[kSpecialCount] = {n % size.x,
                                                    n / size.x % size.y,
                                                    n / size.x / size.y,
                                                    size.x,
                                                    size.y,
                                                    size.z,
                                                    x,
                                                    y,
                                                    z,
                                                    launch_.grid.x,
                                                    launch_.grid.y,
                                                    launch_.grid.z,
                                                    lane,
                                                    n / kWarp,
                                                    (threads_.size() + kWarp - 1) / kWarp,
                                                    4,
                                                    number % 4,
                                                    executed_,
                                                    executed_,
                                                    mine,
                                                    below,
                                                    below | mine,
                                                    ~(below | mine),
                                                    ~below};
      std::copy(std::begin(special), std::end(special), registers);
    }
  }

  void run_block(std::uint64_t number) {
    start(number);
    std::vector<std::uint32_t> warps((threads_.size() + kWarp - 1) / kWarp);
    std::iota(warps.begin(), warps.end(), 0u);
    for (;;) {
      std::shuffle(warps.begin(), warps.end(), random_);
      bool moved = false;
      for (const std::uint32_t warp : warps) moved |= run_warp(warp, number);
      const auto in = [&](State state) {
        return std::any_of(threads_.begin(), threads_.end(),
                           [state](const Thread& thread) { return thread.state == state; });
      };
      if (in(State::kReady)) continue;
      if (!in(State::kAtBarrier) && !in(State::kInWarp)) return;
      if (!in(State::kInWarp)) {
        release_barrier(number);
      } else if (!moved) {
        stuck(number);
      }
    }
  }

  /// Runs each thread of the warp as far as it comes; whether anything happened.
  bool run_warp(std::uint32_t warp, std::uint64_t block) {
    std::uint32_t order[kWarp];
    std::iota(std::begin(order), std::end(order), 0u);
    std::shuffle(std::begin(order), std::end(order), random_);
    bool moved = false;
    for (;;) {
      bool again = false;
      for (const std::uint32_t lane : order) {
        const std::size_t index = warp * kWarp + lane;
        if (index >= threads_.size() || threads_[index].state != State::kReady) continue;
        run_thread(threads_[index], block);
        moved = true;
      }
      while (meet(warp, block)) again = moved = true;
      if (!again) return moved;
    }
  }

  void run_thread(Thread& thread, std::uint64_t block) {
    const Instruction* const code = kernel_.code.data();
    const Instruction* i = code;
    try {
      for (std::uint64_t turn = 0; turn < kTurn; ++turn) {
        i = code + thread.pc++;
        ++executed_;
        if (i->guard >= 0 && ((thread.registers[i->guard] & 1) != 0) == i->guard_not) continue;
        const After after = i->run(thread, *i);
        if (after == After::kGoOn) continue;
        thread.waits_at = i;
        if (after == After::kExit) thread.state = State::kDone;
        return;
      }
      if (executed_ > launch_.instructions_max) {
        throw Fault(cudaErrorLaunchTimeout,
                    fmt::format("{} instructions ran, and it has not ended", executed_));
      }
    } catch (const Fault& fault) {
      rethrow(fault, thread, block, *i);
    }
  }

  /// Lets one group of lanes that all wait at the same instruction do it; whether one could.
  bool meet(std::uint32_t warp, std::uint64_t block) {
    for (std::uint32_t lane = 0; lane < kWarp; ++lane) {
      Thread* first = thread_of(warp, lane);
      if (first == nullptr || first->state != State::kInWarp) continue;
      const std::uint32_t members = members_of(*first);
      try {
        if ((members >> lane & 1) == 0) {
          throw Fault(cudaErrorLaunchFailure, fmt::format("its mask {:#x} lacks it", members));
        }
        Thread* lanes[kWarp] = {};
        if (!gather(warp, *first, members, lanes)) continue;
        do_together(lanes);
        for (Thread* thread : lanes) {
          if (thread == nullptr) continue;
          thread->state = State::kReady;
          thread->warp_syncs = syncs_ + 1;
        }
        ++syncs_;
        return true;
      } catch (const Fault& fault) {
        rethrow(fault, *first, block, *first->waits_at);
      }
    }
    return false;
  }

  bool gather(std::uint32_t warp, const Thread& first, std::uint32_t members,
              std::span<Thread*, kWarp> lanes) {
    for (std::uint32_t lane = 0; lane < kWarp; ++lane) {
      if ((members >> lane & 1) == 0) continue;
      Thread* thread = thread_of(warp, lane);
      // Lanes that the block does not have, and those that ended, count as arrived at bar.warp and
      // at nothing else: what they would give is undefined.
      if (thread == nullptr || thread->state == State::kDone) continue;
      if (thread->state != State::kInWarp || thread->waits_at != first.waits_at) return false;
      lanes[lane] = thread;
    }
    return true;
  }

  /// "All threads in the CTA": those that have not ended, and all at the same barrier.
  void release_barrier(std::uint64_t block) {
    const Thread* first = nullptr;
    for (const Thread& thread : threads_) {
      if (thread.state != State::kAtBarrier) continue;
      if (first == nullptr) first = &thread;
      if (thread.waits_at == first->waits_at) continue;
      const Fault fault(cudaErrorLaunchFailure,
                        fmt::format("it waits at a barrier, and thread {} at another: \"{}\"",
                                    first->index, first->waits_at->text));
      rethrow(fault, thread, block, *thread.waits_at);
    }
    block_.shared.barrier();
    for (Thread& thread : threads_) {
      if (thread.state == State::kAtBarrier) thread.state = State::kReady;
    }
  }

  [[noreturn]] void stuck(std::uint64_t block) {
    const auto waiting = std::find_if(threads_.begin(), threads_.end(), [](const Thread& thread) {
      return thread.state == State::kInWarp;
    });
    const Fault fault(cudaErrorLaunchFailure,
                      fmt::format("it waits for lanes {:#x} of its warp, which do not come",
                                  members_of(*waiting)));
    rethrow(fault, *waiting, block, *waiting->waits_at);
  }

  [[noreturn]] void rethrow(const Fault& fault, const Thread& thread, std::uint64_t block,
                            const Instruction& i) const {
    throw Fault(fault.error, fmt::format("kernel {}, block {}, thread {}, \"{}\": {}", kernel_.name,
                                         block, thread.index, i.text, fault.what()));
  }

  Thread* thread_of(std::uint32_t warp, std::uint32_t lane) {
    const std::size_t index = warp * kWarp + lane;
    return index < threads_.size() ? &threads_[index] : nullptr;
  }

  const Kernel& kernel_;
  const Launch& launch_;
  std::mt19937_64 random_;
  std::vector<Thread> threads_;
  std::vector<std::uint64_t> registers_;
  Block block_;
  std::uint32_t syncs_ = 0;
  std::uint64_t executed_ = 0;
};

}  // namespace

std::uint64_t run(const Kernel& kernel, const Launch& launch, GlobalMemory& memory) {
  return Runner(kernel, launch, memory).run();
}

}  // namespace ziggurat::cuda_double::ptx
