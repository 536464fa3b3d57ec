// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/nccl_library.h: opens libnccl.so.2 at run time and turns its answers into
// errors.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include <memory>
#include <string>

#include "collectives/shared_library.h"

namespace ziggurat {

struct NcclLibrary {
  SharedLibrary library;
#define ZIGGURAT_NCCL(name) decltype(&::name) name##_ = library.function<decltype(&::name)>(#name)
  ZIGGURAT_NCCL(ncclGetVersion);
  ZIGGURAT_NCCL(ncclGetUniqueId);
  ZIGGURAT_NCCL(ncclGetErrorString);
  ZIGGURAT_NCCL(ncclCommInitRankConfig);
  ZIGGURAT_NCCL(ncclCommGetAsyncError);
  ZIGGURAT_NCCL(ncclCommFinalize);
  ZIGGURAT_NCCL(ncclCommDestroy);
  ZIGGURAT_NCCL(ncclCommAbort);
  ZIGGURAT_NCCL(ncclAllGather);
  ZIGGURAT_NCCL(ncclReduceScatter);
  ZIGGURAT_NCCL(ncclAllReduce);
  ZIGGURAT_NCCL(ncclSend);
  ZIGGURAT_NCCL(ncclRecv);
  ZIGGURAT_NCCL(ncclGroupStart);
  ZIGGURAT_NCCL(ncclGroupEnd);
#undef ZIGGURAT_NCCL

  /// Opens the library. Errors: kUnavailable, saying where to get it.
  static std::shared_ptr<const NcclLibrary> open();
  /// "2.32.3".
  std::string version() const;
  /// Throws unless the result is ncclSuccess or ncclInProgress. Errors: kUnavailable, naming
  /// `what`.
  void check(ncclResult_t result, const char* what) const;
};

/// Throws unless `error` is cudaSuccess. Errors: kUnavailable, naming `what`.
void check_cuda(cudaError_t error, const char* what);

}  // namespace ziggurat
