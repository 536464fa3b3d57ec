// SPDX-License-Identifier: Apache-2.0
// tests/core/ranks_harness.h: several ranks in one process, a thread each, connected over loopback:
// their engines, and the same training in plain arrays.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "collectives/exchange/exchange_communicator.h"
#include "tests/collectives/tcp_ranks.h"
#include "tests/core/engine_harness.h"

namespace ziggurat::testing {

/// The runtimes of all ranks, connected. `timeout`: for a rank that does not come. Traffic counts
/// every `ranks_per_host` of them as on one host.
inline std::vector<std::unique_ptr<Runtime>> connected_runtimes(
    int world_size, std::size_t threads, Nanoseconds timeout = std::chrono::minutes(1),
    std::size_t ranks_per_host = 64) {
  std::vector<std::unique_ptr<Runtime>> runtimes;
  std::vector<Reactor*> reactors;
  for (int rank = 0; rank < world_size; ++rank) {
    runtimes.push_back(Runtime::create({.threads = threads, .trace_path = ""}));
    reactors.push_back(&runtimes.back()->reactor);
  }
  std::vector<TcpOptions> options = connected_options(reactors, ranks_per_host);
  for (std::size_t rank = 0; rank < runtimes.size(); ++rank) {
    Runtime& runtime = *runtimes[rank];
    options[rank].timeout = timeout;
    runtime.reactor.block_on([](Runtime& its, TcpOptions& given) -> Task<> {
      its.ranks = std::make_unique<ExchangeCommunicator>(ExchangeTransport::create(
          its.reactor, *its.workers, over_sockets(its.reactor, std::move(given))));
      co_return;
    }(runtime, options[rank]));
  }
  return runtimes;
}

/// Runs `body` for every rank, each on a thread of its own; what each threw, by rank.
inline std::vector<std::exception_ptr> run_ranks(int world_size,
                                                 const std::function<void(int rank)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(world_size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

/// The Error in `thrown`; a failure of the test if there is none.
inline Error error_in(const std::exception_ptr& thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return {ErrorCode::kUnimplemented, "none"};
}

/// Rethrows the first that is there.
inline void expect_none(const std::vector<std::exception_ptr>& errors) {
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

/// One rank of a connected world: its device and its engine.
struct RankRig {
  RankRig(Runtime& its_runtime, const ModelSpec& model, const EngineConfig& config,
          std::uint64_t device_bytes = 8 * kMiB)
      : runtime(its_runtime),
        device(HostDevice::create(runtime.reactor, device_bytes, runtime.trace.get(),
                                  &runtime.metrics)),
        engine(Engine::open(model, config, runtime, *device, initialize)) {}

  Runtime& runtime;
  std::unique_ptr<Device> device;
  std::unique_ptr<Engine> engine;
};

}  // namespace ziggurat::testing
