// SPDX-License-Identifier: Apache-2.0
// tests/base/management_library_double.cc: the four functions of NVIDIA's management library that
// we call, for one GPU.
#include <cstring>

namespace {
bool started = false;
int gpu = 0;
}  // namespace

extern "C" {
[[gnu::visibility("default")]] int nvmlInit_v2();
[[gnu::visibility("default")]] int nvmlShutdown();
[[gnu::visibility("default")]] int nvmlDeviceGetHandleByPciBusId_v2(const char*, void**);
[[gnu::visibility("default")]] int nvmlDeviceGetMemoryInfo(void*, unsigned long long*);

int nvmlInit_v2() {
  started = true;
  return 0;
}
int nvmlShutdown() {
  started = false;
  return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* address, void** device) {
  if (!started || std::strcmp(address, "0000:3b:00.0") != 0) return 6;  // NVML_ERROR_NOT_FOUND
  *device = &gpu;
  return 0;
}
/// Total, free and used bytes.
int nvmlDeviceGetMemoryInfo(void* device, unsigned long long* memory) {
  if (!started || device != &gpu) return 1;
  memory[0] = 1000;
  memory[1] = 600;
  memory[2] = 400;
  return 0;
}
}
