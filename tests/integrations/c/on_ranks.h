// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/on_ranks.h: the ranks of a job behind the C interface, a thread each.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "integrations/c/ziggurat.hpp"
#include "tests/support/free_port.h"

namespace ziggurat::testing {

/// The settings of a rank's runtime.
inline std::string ranks_of(int rank, int world_size, int port, const std::string& more = "") {
  return R"({"threads": 1, "rank": )" + std::to_string(rank) + R"(, "world_size": )" +
         std::to_string(world_size) + R"(, "rendezvous": "127.0.0.1:)" + std::to_string(port) +
         "\"" + more + "}";
}

/// Each rank of a job does `body`, on a thread of its own.
inline void on_ranks(int world_size,
                     const std::function<void(int rank, const ziggurat::Runtime& runtime)>& body) {
  const int port = ziggurat::free_port();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const ziggurat::Runtime runtime(ranks_of(rank, world_size, port));
        body(rank, runtime);
      } catch (const ziggurat::Error& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace ziggurat::testing
