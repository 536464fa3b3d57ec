// SPDX-License-Identifier: Apache-2.0
// tests/fuzz/config_fuzz.cc: a config file of ours or DeepSpeed's.
#include "integrations/deepspeed/config_json.h"
#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ziggurat;
  fuzz::taken([&] {
    ConfigContext context;
    context.fallback = [](std::string_view) { return std::string("1"); };
    context.flag = [](std::string_view) { return std::optional<std::string>(); };
    read_config(fuzz::text_of(data, size), "fuzz", context);
  });
  return 0;
}
