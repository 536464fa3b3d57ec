// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/descriptors.h: checks whether this process may open as many descriptors as
// its ranks need.
#pragma once

#include <cstddef>
#include <string>

#include "base/error.h"

namespace ziggurat {

/// Returns the descriptors that rank `rank` needs while `world_size` ranks connect by sockets: two
/// for each other rank, rank 0's connections to all of them, callers that are not known yet, and
/// some for the rest of the process, beside those open now.
std::size_t descriptors_needed(int rank, int world_size);

/// Raises this process's limit (RLIMIT_NOFILE) as far as needed. Errors: kResourceExhausted, naming
/// the limit and the fix, if the hard limit is lower.
void require_descriptors(int rank, int world_size);

/// Returns whether the errno is EMFILE or ENFILE, which no waiting mends.
bool out_of_descriptors(int error_number) noexcept;
/// Makes the error of a call that failed for lack of descriptors, with the limit and the fix.
/// `what_failed` names the call. kResourceExhausted.
Error descriptor_error(int error_number, const std::string& what_failed);

}  // namespace ziggurat
