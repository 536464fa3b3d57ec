// SPDX-License-Identifier: Apache-2.0
// tests/collectives/nccl/double/nccl_double.h: what a test asks the double of libnccl.so.2, and how
// it injects faults.
//
// ZIGGURAT_NCCL_DOUBLE_FAULT=ncclAllGather:2:WHAT changes the second call of that function in this
// process. WHAT is `error` (it returns ncclInternalError), `async` (it moves no bytes, and
// ncclCommGetAsyncError answers ncclRemoteError from then on), `hang` (it moves no bytes), `die`
// (SIGKILL before it) or `late` (SIGKILL when its bytes are half way).
//
// A rule that is broken ends the process with its text and status 86.
#pragma once

#include <cstddef>

namespace ziggurat::nccl_double {

struct Report {
  std::size_t joined = 0;     ///< ncclCommInitRankConfig
  std::size_t destroyed = 0;  ///< ncclCommDestroy, each after its finalize
  std::size_t aborted = 0;
  std::size_t living = 0;
  std::size_t operations = 0;  ///< collectives, sends and receives
  std::size_t sums = 0;        ///< of operations: those that NCCL adds in
};

using GetReport = void (*)(Report*);
inline constexpr const char* kReportSymbol = "ziggurat_nccl_double_report";

}  // namespace ziggurat::nccl_double
