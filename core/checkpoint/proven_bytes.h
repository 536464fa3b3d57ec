// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/proven_bytes.h: bytes that were read and compared with their hash, kept for a
// while because a neighbour needs the rest of what is hashed together. Reactor's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <utility>

#include "aio/aligned_bytes.h"
#include "base/runtime/async.h"
#include "base/runtime/worker_pool.h"

namespace ziggurat {

class ProvenBytes {
 public:
  using Key = std::pair<std::size_t, std::size_t>;
  using Bytes = std::shared_ptr<const AlignedBytes>;
  /// Reads and compares the bytes of a key. Errors: whatever the reading throws.
  using Read = std::function<Task<>(std::span<std::byte> into)>;

  /// `memory` provides the bytes, and must outlive this.
  ProvenBytes(Reactor& reactor, AlignedPool& memory, std::uint64_t kept_bytes_max)
      : reactor_(reactor), memory_(memory), kept_bytes_max_(kept_bytes_max) {}

  /// Arguments of AlignedBytes.
  struct Size {
    std::uint64_t bytes;
    std::uint64_t lead_bytes = 0;
  };
  /// Returns the bytes of `key`, which are read once however many ask for them at a time. `read` is
  /// used only until the Task ends.
  Task<Bytes> get(Key key, Size size, const Read& read);

 private:
  struct Entry {
    Entry(Reactor& reactor, AlignedBytes memory)
        : bytes(std::make_shared<AlignedBytes>(std::move(memory))), ready(reactor) {}
    std::shared_ptr<AlignedBytes> bytes;
    Signal ready;
    std::list<Key>::iterator place{};  ///< its place in kept_, if it is kept
    bool kept = false;
  };
  using EntryPtr = std::shared_ptr<Entry>;
  static std::uint64_t held_bytes(const Entry& entry);
  void keep(const Key& key, const EntryPtr& entry);

  Reactor& reactor_;
  AlignedPool& memory_;
  std::uint64_t kept_bytes_max_;
  std::map<Key, EntryPtr> entries_;
  std::list<Key> kept_;  // the key used last comes last
  std::uint64_t kept_bytes_ = 0;
};

/// Runs `job`, which goes through `size_bytes` of memory once. It runs on a worker, or at once if
/// handing it over would cost more (a model has thousands of biases). `name` is that of
/// Workers::run().
Task<> run_pass(Reactor& reactor, Workers& workers, const char* name, std::uint64_t size_bytes,
                const std::function<void()>& job);

}  // namespace ziggurat
