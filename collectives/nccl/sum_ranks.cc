// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/sum_ranks.cc: the sum by the host's kernel, over a copy of the rows. The bits
// are those of a kernel on the device; the way through host memory is not its speed.
#include "collectives/nccl/sum_ranks.h"

#include <vector>

#include "collectives/nccl/nccl_library.h"
#include "collectives/rank_sum.h"

namespace ziggurat {

void sum_ranks(cudaStream_t stream, const RankRows& rows, DType dtype, std::size_t count,
               std::byte* sum) {
  const std::size_t length = count * size_bytes(dtype);
  if (length == 0) return;
  std::vector<std::byte> host(length * rows.ranks);
  std::vector<const std::byte*> terms;
  for (std::size_t r = 0; r < rows.ranks; ++r) {
    std::byte* const term = host.data() + r * length;
    check_cuda(cudaMemcpyAsync(term, rows.first + r * rows.stride_bytes, length,
                               cudaMemcpyDeviceToHost, stream),
               "cudaMemcpyAsync");
    terms.push_back(term);
  }
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  sum_in_rank_order(terms, dtype, count, host.data());
  check_cuda(cudaMemcpyAsync(sum, host.data(), length, cudaMemcpyHostToDevice, stream),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

}  // namespace ziggurat
