// SPDX-License-Identifier: Apache-2.0
// tests/collectives/nccl/fake_nccl.h: what NCCL does, in this process's memory: so that all that
// goes on around it is tested where there is no GPU.
#pragma once

#include <memory>

#include "collectives/nccl/nccl_communicator.h"

namespace ziggurat {

/// Ranks of this process with such devices find each other by the id that one of them made. Like
/// NCCL, it trusts its callers: calls that differ mix their data. Sums are in rank order, unlike
/// NCCL's.
std::shared_ptr<NcclDevice> fake_nccl();

}  // namespace ziggurat
