// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/proven_bytes.h: bytes that were read and compared with their hash, kept for a
// while: a neighbour needs the rest of what is hashed together. Reactor's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <utility>

#include "base/runtime/async.h"

namespace ziggurat {

/// On a page boundary, as direct reads want it.
class AlignedBytes {
 public:
  /// Errors: kResourceExhausted.
  explicit AlignedBytes(std::uint64_t size_bytes);
  std::span<std::byte> span() const noexcept { return {memory_.get(), size_}; }

 private:
  std::unique_ptr<std::byte, decltype(&std::free)> memory_;
  std::size_t size_;
};

class ProvenBytes {
 public:
  using Key = std::pair<std::size_t, std::size_t>;
  using Bytes = std::shared_ptr<const AlignedBytes>;
  /// Reads and compares what a key stands for. Errors: its own.
  using Read = std::function<Task<>(std::span<std::byte> into)>;

  ProvenBytes(Reactor& reactor, std::uint64_t kept_bytes_max)
      : reactor_(reactor), kept_bytes_max_(kept_bytes_max) {}

  /// The bytes of `key`, `size_bytes` of them, read once however many ask at a time. `read` is used
  /// before the Task ends.
  Task<Bytes> get(Key key, std::uint64_t size_bytes, const Read& read);

 private:
  struct Entry {
    Entry(Reactor& reactor, std::uint64_t size_bytes)
        : bytes(std::make_shared<AlignedBytes>(size_bytes)), ready(reactor) {}
    std::shared_ptr<AlignedBytes> bytes;
    Signal ready;
  };
  using EntryPtr = std::shared_ptr<Entry>;
  void keep(const Key& key, const Entry& entry);

  Reactor& reactor_;
  std::uint64_t kept_bytes_max_;
  std::map<Key, EntryPtr> entries_;
  std::list<Key> kept_;  // the one used last comes last
  std::uint64_t kept_bytes_ = 0;
};

}  // namespace ziggurat
