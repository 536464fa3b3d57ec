// SPDX-License-Identifier: Apache-2.0
// tests/aio/engine_cases.cc: the table of engines.
#include "tests/aio/engine_cases.h"

#include "aio/drive_queue.h"
#include "aio/faulty_engine.h"
#include "aio/simulated_engine.h"
#include "aio/thread_engine.h"
#ifdef ZIGGURAT_HAVE_LIBAIO
#include "aio/libaio_engine.h"
#endif
#ifdef ZIGGURAT_HAVE_URING
#include "aio/uring_engine.h"
#endif
#include "base/bytes.h"
#include "base/error.h"

namespace ziggurat::testing_support {
namespace {

constexpr std::uint64_t kSimulatedCapacity = 256 * kMiB;

MakeEngine threads() {
  return [](Reactor& reactor) { return std::make_unique<ThreadEngine>(reactor); };
}

MakeEngine simulated() {
  auto disk = std::make_shared<SimulatedDisk>(kSimulatedCapacity);
  return [disk](Reactor& reactor) { return std::make_unique<SimulatedEngine>(reactor, *disk); };
}

#ifdef ZIGGURAT_HAVE_LIBAIO
MakeEngine libaio() {
  return [](Reactor& reactor) { return LibaioEngine::create(reactor); };
}
#endif

#ifdef ZIGGURAT_HAVE_URING
MakeEngine uring() {
  return [](Reactor& reactor) { return UringEngine::create(reactor); };
}
#endif

#if defined(ZIGGURAT_HAVE_LIBAIO) || defined(ZIGGURAT_HAVE_URING)
bool works(const MakeEngine& make) {
  try {
    Reactor reactor;
    static_cast<void>(make(reactor));
    return true;
  } catch (const Error&) {
    return false;  // forbidden here; probe_test.cc tests that this is said
  }
}
#endif

// So small that most of what a test submits waits.
constexpr DriveQueueOptions kSmallQueue{.outstanding_bytes_max = 64 * kKiB,
                                        .overtaken_bytes_max = 256 * kKiB};

EngineCase with_a_queue(const EngineCase& plain) {
  EngineCase queued = plain;
  queued.name = "queued_" + plain.name;
  queued.make_world = [make_world = plain.make_world]() -> MakeEngine {
    return [make = make_world()](Reactor& reactor) {
      return std::make_unique<DriveQueue>(reactor, make(reactor), kSmallQueue);
    };
  };
  return queued;
}

EngineCase with_faults_possible(const EngineCase& plain) {
  EngineCase faulty = plain;
  faulty.name = "faulty_" + plain.name;
  faulty.make_world = [make_world = plain.make_world]() -> MakeEngine {
    return [make = make_world()](Reactor& reactor) {
      return std::make_unique<FaultyEngine>(reactor, make(reactor));
    };
  };
  return faulty;
}

std::vector<EngineCase> all_cases() {
  std::vector<EngineCase> all = {
      {"threads", Clock::Kind::kReal, true, threads},
      {"simulated", Clock::Kind::kVirtual, false, simulated},
  };
#ifdef ZIGGURAT_HAVE_LIBAIO
  if (works(libaio())) all.push_back({"libaio", Clock::Kind::kReal, true, libaio});
#endif
#ifdef ZIGGURAT_HAVE_URING
  if (works(uring())) all.push_back({"uring", Clock::Kind::kReal, true, uring});
#endif
  all.push_back(with_a_queue(all[1]));               // simulated
  all.push_back(with_a_queue(all[all.size() - 2]));  // the best real one here
  const std::size_t plain = all.size();
  for (std::size_t i = 0; i < plain; ++i) all.push_back(with_faults_possible(all[i]));
  return all;
}

}  // namespace

// Asked for again for each test of a suite, and a libaio engine takes 40 ms to go.
const std::vector<EngineCase>& engine_cases() {
  static const std::vector<EngineCase> all = all_cases();
  return all;
}

}  // namespace ziggurat::testing_support
