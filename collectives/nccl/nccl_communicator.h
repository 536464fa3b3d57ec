// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/nccl_communicator.h: ranks with a GPU each, over NCCL; what NCCL cannot promise
// comes from sockets beside it.
//
// NCCL takes a call on trust: ranks that make different ones hang or mix their data, and so do
// those that make the same ones in another order. So each call is announced over sockets first, and
// given to NCCL when every member has announced the same, in one order for all communicators of all
// ranks (call_order.h). Sockets also carry what is small (doubles, integers), send and recv, and
// the news that a rank is gone, on which what is under way at NCCL is aborted.
//
// Sums have the bits of all other back-ends: each owner gets its elements from all ranks and adds
// them in rank order. Reduce::kNccl leaves them to NCCL, whose order is its own. Either way a rank
// sends (N - 1) n bytes for reduce_scatter and twice that for all_reduce, n being a slice.
//
// split() begins to join at once, so that all have joined when the first call is made. Members of
// one list share what NCCL needs for them. Reactor's thread.
#pragma once

#include <memory>

#include "collectives/communicator.h"
#include "collectives/exchange/exchange_transport.h"
#include "collectives/nccl/nccl_device.h"

namespace ziggurat {

/// A communicator of the ranks of `transport`, which is its own from here on. Blocks until all have
/// joined; not on the reactor's thread. The last relative is destroyed elsewhere too: it waits for
/// all ranks to part in order, no longer than the timeout. Errors: kInvalidArgument for ranks that
/// share a GPU, or differ in `reduce` or in NCCL's version.
std::unique_ptr<Communicator> over_nccl(std::shared_ptr<ExchangeTransport> transport,
                                        std::unique_ptr<NcclDevice> device,
                                        const NcclOptions& options);

}  // namespace ziggurat
