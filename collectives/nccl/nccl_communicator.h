// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/nccl_communicator.h: a communicator of ranks with one GPU each, over NCCL.
// Sockets beside it do what NCCL cannot.
//
// NCCL does not check calls: ranks that make different ones hang or mix their data, and so do ranks
// that make the same ones in different orders. So each call is announced over sockets first. It is
// given to NCCL when every member has announced the same, in one order for all communicators of all
// ranks (call_order.h). Sockets also carry small things (doubles, integers), send and recv, and the
// news that a rank is gone; then calls under way at NCCL are aborted.
//
// Sums have the bits of all other back-ends: each owner gets its elements from all ranks and adds
// them in rank order. With Reduce::kNccl, NCCL makes the sums in its own order. Either way a rank
// sends (N - 1) n bytes for reduce_scatter and twice that for all_reduce, where n is a slice.
//
// split() begins to join at once, so that all have joined when the first call is made.
// Communicators with equal members share what NCCL needs for them. Reactor's thread.
#pragma once

#include <memory>

#include "collectives/communicator.h"
#include "collectives/exchange/exchange_transport.h"
#include "collectives/nccl/nccl_device.h"

namespace ziggurat {

/// Makes a communicator of the ranks of `transport`, which belongs to it from now on. Blocks until
/// all have joined; not to be called on the reactor's thread. The last relative must not be
/// destroyed on that thread either: it waits until all ranks have parted in order, at most for the
/// timeout. Errors: kInvalidArgument for ranks that share a GPU, or differ in `reduce` or in NCCL's
/// version.
std::unique_ptr<Communicator> over_nccl(std::shared_ptr<ExchangeTransport> transport,
                                        std::unique_ptr<NcclDevice> device,
                                        const NcclOptions& options);

}  // namespace ziggurat
