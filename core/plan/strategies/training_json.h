// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/training_json.h: a training and its prediction as JSON, for programs in
// other languages. The keys are the names of the structs' fields (training.h, layout.h, machine.h).
#pragma once

#include <string>
#include <string_view>

namespace ziggurat {

/// Answers a request:
///
///   {"model": "qwen3-4b", or a path, or an object with ModelShape's fields,
///    "machine": "h100x8", or a path; time is predicted only with it,
///    "layout": {"dp": 8, "stage": 3, "params": "host", ..},
///    "recipe": {"param": 4, "gradient": 4, "master": 0, "moments": 8},
///    "lora": {"rank": 16, "copies": 4, "experts": true, "frozen_param_bytes": 2},
///    "sequence": 4096, "micro_batch": 1, "micro_batches": 2,
///    "recompute": "nothing", "selective" or "full", "offloads_activations": false,
///    "software": {"flash": true, ..}}
///
/// With "gpus" in place of "layout" the usual strategies are compared: the answer has "strategies",
/// "recommended" (null if none fits), "answer", "decision", "hidden_at", "fewest_gpus_by_states"
/// and "fewest_gpus". What is not there has its default. The answer has "parameters"; "memory" with
/// "device_bytes", "worst", "instants" and "below"; and "time" with "seconds", "bound", "binds",
/// "busy" and "lines". A list of requests is answered by a list. Errors: kInvalidArgument naming
/// the key; find_model()'s and find_machine()'s.
std::string answer_json(std::string_view request);

struct Comparison;
struct Job;
/// Returns a comparison as answer_json() gives it, indented.
std::string comparison_json(const Job& job, const Comparison& comparison);

}  // namespace ziggurat
