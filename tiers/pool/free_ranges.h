// SPDX-License-Identifier: Apache-2.0
// tiers/pool/free_ranges.h: a set of disjoint ranges in order of address. It finds the first range
// that is long enough without looking at the shorter ones before it.
//
// A treap (a binary tree that hashed keys balance) in which each node knows the longest range below
// it. Every operation looks at O(log n) nodes. The shape depends on the ranges alone, so equal
// calls do equal work. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

namespace ziggurat {

struct FreeRange {
  std::uint64_t offset_bytes;
  std::uint64_t size_bytes;
  std::uint64_t end() const noexcept { return offset_bytes + size_bytes; }
};

class FreeRanges {
 public:
  FreeRanges() noexcept;
  FreeRanges(FreeRanges&&) noexcept;
  FreeRanges& operator=(FreeRanges&&) noexcept;
  ~FreeRanges();

  void insert(FreeRange range);
  /// Removes the range that begins at `offset_bytes`, which must be in the set.
  void erase(std::uint64_t offset_bytes);

  /// Returns the range of lowest address that has at least `size_bytes`.
  std::optional<FreeRange> first_of_at_least(std::uint64_t size_bytes) const noexcept;
  /// Returns the lowest, or highest, offset at which `size_bytes` are free inside `within`.
  std::optional<std::uint64_t> lowest_place(std::uint64_t size_bytes,
                                            FreeRange within) const noexcept;
  std::optional<std::uint64_t> highest_place(std::uint64_t size_bytes,
                                             FreeRange within) const noexcept;
  /// Returns the first range that begins at `offset_bytes` or later.
  std::optional<FreeRange> at_or_after(std::uint64_t offset_bytes) const noexcept;
  /// Returns the last range that begins before `offset_bytes`.
  std::optional<FreeRange> before(std::uint64_t offset_bytes) const noexcept;
  /// Returns the size of the longest range; 0 if the set is empty.
  std::uint64_t longest_bytes() const noexcept;

 private:
  struct Node;
  using Tree = std::unique_ptr<Node>;
  static void refresh(Node& node) noexcept;
  static void split(Tree tree, std::uint64_t offset_bytes, Tree& before, Tree& from);
  static Tree join(Tree before, Tree after);
  static void erase_from(Tree& tree, std::uint64_t offset_bytes);
  static const Node* first_from(const Node* node, std::uint64_t size_bytes,
                                std::uint64_t offset_bytes) noexcept;
  static const Node* last_before(const Node* node, std::uint64_t size_bytes,
                                 std::uint64_t offset_bytes) noexcept;

  Tree root_;
};

}  // namespace ziggurat
