// SPDX-License-Identifier: Apache-2.0
// tests/core/open_store.h: a store as whoever is not one of its ranks sees it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "aio/thread_engine.h"
#include "core/checkpoint/stored_state.h"
#include "core/engine/runtime.h"

namespace ziggurat::testing {

/// A store opened to be read; everything of it is on the runtime's reactor.
class OpenStore {
 public:
  OpenStore(Runtime& runtime, std::vector<std::string> directories) : runtime_(runtime) {
    runtime.reactor.block_on([](OpenStore& self, const std::vector<std::string>& from) -> Task<> {
      self.io_ = std::make_unique<ThreadEngine>(self.runtime_.reactor);
      std::vector<StripePlace> places;
      for (const std::string& directory : from)
        places.push_back({.io = *self.io_, .observers = {}, .directory = directory});
      Task<std::unique_ptr<StoredState>> opening =
          StoredState::open(self.runtime_.reactor, *self.runtime_.workers, std::move(places));
      self.state_ = co_await std::move(opening);
    }(*this, directories));
  }
  OpenStore(Runtime& runtime, const std::string& directory)
      : OpenStore(runtime, std::vector<std::string>{directory}) {}
  ~OpenStore() {
    runtime_.reactor.block_on([](OpenStore& self) -> Task<> {
      self.state_.reset();
      self.io_.reset();
      co_return;
    }(*this));
  }
  OpenStore(const OpenStore&) = delete;

  StoredState& state() noexcept { return *state_; }
  std::map<std::string, std::vector<std::byte>> tensors() {
    std::map<std::string, std::vector<std::byte>> all;
    runtime_.reactor.block_on(
        [](StoredState& from, std::map<std::string, std::vector<std::byte>>& to) -> Task<> {
          const std::vector<StateTensor>& tensors = from.content().tensors;
          for (std::size_t t = 0; t < tensors.size(); ++t) {
            std::vector<std::byte>& bytes = to[tensors[t].name];
            bytes.resize(tensors[t].size_bytes());
            const TensorRun whole{.first = 0, .count = tensors[t].count(), .at = 0};
            co_await from.read(t, std::span(&whole, 1), bytes);
          }
        }(*state_, all));
    return all;
  }
  void prove() { runtime_.reactor.block_on(state_->prove({})); }

 private:
  Runtime& runtime_;
  std::unique_ptr<IoEngine> io_;
  std::unique_ptr<StoredState> state_;
};

}  // namespace ziggurat::testing
