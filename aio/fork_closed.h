// SPDX-License-Identifier: Apache-2.0
// aio/fork_closed.h: descriptors and memory that forked children do not keep.
//
// A trainer forks helpers (PyTorch's DataLoader). A child that had the store's file open would hold
// its lock: after the trainer was killed, nobody could resume the run until the child ended. A
// child that had an io_uring ring would keep the ring's registered files open in the same way.
// Close-on-exec does not help, because these children never call exec.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace ziggurat {

/// Makes every later child close `fd` before fork() returns in the child. Any thread.
void close_in_children(int fd);
/// Undoes close_in_children(): this process is about to close `fd`.
void forget_for_children(int fd) noexcept;

/// Keeps `pages` out of forked children. Otherwise the first write after a fork would copy a page,
/// and a drive's transfer could go to another page than the one that its owner sees. `owner` names
/// the memory in the message that is logged if this fails.
void keep_out_of_children(std::span<std::byte> pages, std::string_view owner);

}  // namespace ziggurat
