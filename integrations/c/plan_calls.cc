// SPDX-License-Identifier: Apache-2.0
// integrations/c/plan_calls.cc: the C function that plans any model on any machine.
#include "core/plan/strategies/training_json.h"
#include "integrations/c/c_call.h"

ziggurat_status ziggurat_plan(const char* request, char* text, uint64_t capacity_bytes,
                              uint64_t* needed_bytes) {
  return ziggurat::guarded([&] {
    ziggurat::give_text(ziggurat::answer_json(ziggurat::required(request, "request")), text,
                        capacity_bytes, needed_bytes);
  });
}
