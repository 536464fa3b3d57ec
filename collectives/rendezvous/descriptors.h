// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/descriptors.h: whether this process may open as many descriptors as its
// ranks take.
#pragma once

#include <cstddef>
#include <string>

#include "base/error.h"

namespace ziggurat {

/// Descriptors of rank `rank` while `world_size` ranks connect by sockets: two for each other rank,
/// rank 0's connections to all of them, callers that are not known yet, and some for the rest of
/// the process beside those open now.
std::size_t descriptors_needed(int rank, int world_size);

/// Raises this process's limit (RLIMIT_NOFILE) as far as that takes. Errors: kResourceExhausted,
/// naming the limit and the fix, where the hard limit is lower.
void require_descriptors(int rank, int world_size);

/// EMFILE or ENFILE: nothing that waiting mends.
bool out_of_descriptors(int error_number) noexcept;
/// For one of them, in `what_failed`: with the limit and the fix. kResourceExhausted.
Error descriptor_error(int error_number, const std::string& what_failed);

}  // namespace ziggurat
