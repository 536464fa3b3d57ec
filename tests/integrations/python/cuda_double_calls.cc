// SPDX-License-Identifier: Apache-2.0
// tests/integrations/python/cuda_double_calls.cc: libziggurat over the double of the CUDA runtime
// has these functions too, by which a test in Python controls it (cuda_double.py).
//
// Each returns 0, or a code of CUDA's for an error; those that have none of CUDA's end the process.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "integrations/c/ziggurat.h"
#include "tests/cuda_double/cuda_double.h"

namespace {

using namespace ziggurat::cuda_double;

}  // namespace

extern "C" {

/// The calling thread is the one that computes: while it runs, time goes on for its sections alone.
ZIGGURAT_API void ziggurat_double_reset(uint64_t seed, uint64_t memory_bytes, int driver_version,
                                        int mischief) {
  reset(seed, {.memory_bytes = memory_bytes,
               .driver_version = driver_version,
               .pace = Pace::kWhenQuiet,
               .computing_thread = gettid(),
               .has_sections = true,
               .mischief = static_cast<Mischief>(mischief)});
}

ZIGGURAT_API int ziggurat_double_new_stream(void** stream) {
  return cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking);
}

ZIGGURAT_API int ziggurat_double_destroy_stream(void* stream) {
  return cudaStreamDestroy(static_cast<cudaStream_t>(stream));
}

ZIGGURAT_API int ziggurat_double_synchronize(void* stream) {
  return cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
}

ZIGGURAT_API int ziggurat_double_begin_section(void* stream, uint64_t count,
                                               const uint64_t* addresses, const uint64_t* sizes,
                                               int writes) {
  std::vector<SectionMemory> memory(count);
  for (uint64_t i = 0; i < count; ++i)
    memory[i] = {reinterpret_cast<const void*>(addresses[i]), sizes[i], writes != 0};
  return begin_section(static_cast<cudaStream_t>(stream), memory);
}

ZIGGURAT_API void ziggurat_double_end_section(void* stream) {
  end_section(static_cast<cudaStream_t>(stream));
}

ZIGGURAT_API uint64_t ziggurat_double_view(uint64_t address, uint64_t size_bytes) {
  return reinterpret_cast<uint64_t>(section_view(reinterpret_cast<void*>(address), size_bytes));
}

/// The findings so far, and with `at_end` what is left, one a line. They are taken.
ZIGGURAT_API void ziggurat_double_report(int at_end, char* text, uint64_t capacity_bytes) {
  std::string lines;
  for (const std::string& one : at_end != 0 ? report() : take_findings()) lines += one + "\n";
  lines.resize(std::min<std::size_t>(lines.size(), capacity_bytes - 1));
  std::memcpy(text, lines.c_str(), lines.size() + 1);
}

ZIGGURAT_API uint64_t ziggurat_double_trace() { return trace_hash(); }

}  // extern "C"
