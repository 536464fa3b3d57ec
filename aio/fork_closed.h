// SPDX-License-Identifier: Apache-2.0
// aio/fork_closed.h: descriptors and memory that forked children do not keep.
//
// A trainer's helpers are forked from it (PyTorch's DataLoader). With the store's file they would
// hold its lock, and for as long as they outlive a killed trainer nobody could go on with the run;
// a ring that they hold keeps its files just so. Close-on-exec does not help, as they never exec.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace ziggurat {

/// From now on a child closes `fd` before fork() returns in it. Any thread.
void close_in_children(int fd);
/// `fd` is about to be closed here.
void forget_for_children(int fd) noexcept;

/// Children have no such pages: copied at the first write after a fork, what a drive reads into
/// would be another page than its owner's. `owner`: for the message where that cannot be had.
void keep_out_of_children(std::span<std::byte> pages, std::string_view owner);

}  // namespace ziggurat
