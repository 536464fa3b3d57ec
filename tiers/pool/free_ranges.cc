// SPDX-License-Identifier: Apache-2.0
// tiers/pool/free_ranges.cc: splits the tree at an address and joins it again. A node's longest
// range is updated on the way back up.
#include "tiers/pool/free_ranges.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace ziggurat {
namespace {

/// Spreads offsets, which are multiples of a page, over all 64 bits (the finalizer of SplitMix64).
std::uint64_t spread(std::uint64_t value) noexcept {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

}  // namespace

struct FreeRanges::Node {
  explicit Node(FreeRange its_range)
      : range(its_range), longest(its_range.size_bytes), rank(spread(its_range.offset_bytes + 1)) {}
  FreeRange range;
  std::uint64_t longest;  // longest range of this node and all below it
  std::uint64_t rank;     // at least that of every node below
  Tree left;
  Tree right;
};

FreeRanges::FreeRanges() noexcept = default;
FreeRanges::FreeRanges(FreeRanges&&) noexcept = default;
FreeRanges& FreeRanges::operator=(FreeRanges&&) noexcept = default;
FreeRanges::~FreeRanges() = default;

void FreeRanges::refresh(Node& node) noexcept {
  node.longest = node.range.size_bytes;
  if (node.left) node.longest = std::max(node.longest, node.left->longest);
  if (node.right) node.longest = std::max(node.longest, node.right->longest);
}

void FreeRanges::split(Tree tree, std::uint64_t offset_bytes, Tree& before, Tree& from) {
  if (!tree) {
    before.reset();
    from.reset();
  } else if (tree->range.offset_bytes < offset_bytes) {
    Tree rest = std::move(tree->right);
    split(std::move(rest), offset_bytes, tree->right, from);
    refresh(*tree);
    before = std::move(tree);
  } else {
    Tree rest = std::move(tree->left);
    split(std::move(rest), offset_bytes, before, tree->left);
    refresh(*tree);
    from = std::move(tree);
  }
}

FreeRanges::Tree FreeRanges::join(Tree before, Tree after) {
  if (!before) return after;
  if (!after) return before;
  if (before->rank > after->rank) {
    before->right = join(std::move(before->right), std::move(after));
    refresh(*before);
    return before;
  }
  after->left = join(std::move(before), std::move(after->left));
  refresh(*after);
  return after;
}

void FreeRanges::insert(FreeRange range) {
  Tree before;
  Tree after;
  split(std::move(root_), range.offset_bytes, before, after);
  root_ = join(join(std::move(before), std::make_unique<Node>(range)), std::move(after));
}

void FreeRanges::erase(std::uint64_t offset_bytes) { erase_from(root_, offset_bytes); }

void FreeRanges::erase_from(Tree& tree, std::uint64_t offset_bytes) {
  ZIGGURAT_CHECK(tree != nullptr, "no free range begins at {}", offset_bytes);
  if (tree->range.offset_bytes == offset_bytes) {
    tree = join(std::move(tree->left), std::move(tree->right));
    return;
  }
  erase_from(offset_bytes < tree->range.offset_bytes ? tree->left : tree->right, offset_bytes);
  refresh(*tree);
}

std::optional<FreeRange> FreeRanges::first_of_at_least(std::uint64_t size_bytes) const noexcept {
  const Node* node = root_.get();
  if (node == nullptr || node->longest < size_bytes) return std::nullopt;
  for (;;) {  // the range is at `node` or below it
    if (node->left && node->left->longest >= size_bytes) {
      node = node->left.get();
    } else if (node->range.size_bytes >= size_bytes) {
      return node->range;
    } else {
      node = node->right.get();
    }
  }
}

/// Returns the first range of at least `size_bytes` that begins at `offset_bytes` or later.
/// Descends the tree at most twice: along the bound, and from there into one subtree that is known
/// to have the range.
const FreeRanges::Node* FreeRanges::first_from(const Node* node, std::uint64_t size_bytes,
                                               std::uint64_t offset_bytes) noexcept {
  if (node == nullptr || node->longest < size_bytes) return nullptr;
  if (node->range.offset_bytes < offset_bytes)
    return first_from(node->right.get(), size_bytes, offset_bytes);
  if (const Node* found = first_from(node->left.get(), size_bytes, offset_bytes)) return found;
  if (node->range.size_bytes >= size_bytes) return node;
  return first_from(node->right.get(), size_bytes, offset_bytes);
}

const FreeRanges::Node* FreeRanges::last_before(const Node* node, std::uint64_t size_bytes,
                                                std::uint64_t offset_bytes) noexcept {
  if (node == nullptr || node->longest < size_bytes) return nullptr;
  if (node->range.offset_bytes >= offset_bytes)
    return last_before(node->left.get(), size_bytes, offset_bytes);
  if (const Node* found = last_before(node->right.get(), size_bytes, offset_bytes)) return found;
  if (node->range.size_bytes >= size_bytes) return node;
  return last_before(node->left.get(), size_bytes, offset_bytes);
}

std::optional<std::uint64_t> FreeRanges::lowest_place(std::uint64_t size_bytes,
                                                      FreeRange within) const noexcept {
  const auto cut = before(within.offset_bytes);  // may reach into `within`
  if (cut && std::min(cut->end(), within.end()) >= within.offset_bytes + size_bytes)
    return within.offset_bytes;
  const Node* node = first_from(root_.get(), size_bytes, within.offset_bytes);
  if (node == nullptr || node->range.offset_bytes + size_bytes > within.end()) return std::nullopt;
  return node->range.offset_bytes;
}

std::optional<std::uint64_t> FreeRanges::highest_place(std::uint64_t size_bytes,
                                                       FreeRange within) const noexcept {
  const auto cut = before(within.end());  // may reach beyond `within`
  if (!cut) return std::nullopt;
  const auto place_in = [&](const FreeRange& range) -> std::optional<std::uint64_t> {
    const std::uint64_t begin = std::max(range.offset_bytes, within.offset_bytes);
    const std::uint64_t end = std::min(range.end(), within.end());
    if (end < begin + size_bytes) return std::nullopt;
    return end - size_bytes;
  };
  if (const auto place = place_in(*cut)) return place;
  const Node* node = last_before(root_.get(), size_bytes, cut->offset_bytes);
  if (node == nullptr) return std::nullopt;
  return place_in(node->range);
}

std::optional<FreeRange> FreeRanges::at_or_after(std::uint64_t offset_bytes) const noexcept {
  std::optional<FreeRange> found;
  for (const Node* node = root_.get(); node != nullptr;) {
    const bool candidate = node->range.offset_bytes >= offset_bytes;
    if (candidate) found = node->range;
    node = candidate ? node->left.get() : node->right.get();
  }
  return found;
}

std::optional<FreeRange> FreeRanges::before(std::uint64_t offset_bytes) const noexcept {
  std::optional<FreeRange> found;
  for (const Node* node = root_.get(); node != nullptr;) {
    const bool candidate = node->range.offset_bytes < offset_bytes;
    if (candidate) found = node->range;
    node = candidate ? node->right.get() : node->left.get();
  }
  return found;
}

std::uint64_t FreeRanges::longest_bytes() const noexcept { return root_ ? root_->longest : 0; }

}  // namespace ziggurat
