// SPDX-License-Identifier: Apache-2.0
// integrations/c/c_words.cc: says every setting in words of C, and leaves out advice that a C
// caller cannot follow.
#include "integrations/c/c_words.h"

#include <fmt/format.h>

#include <map>
#include <optional>
#include <regex>
#include <utility>
#include <vector>

namespace ziggurat {
namespace {

/// Returns where a C caller gives what a setting gives: a key of ziggurat_engine_open()'s settings,
/// a call or a field; empty if nowhere.
const std::map<std::string, std::string, std::less<>>& places() {
  static const std::map<std::string, std::string, std::less<>> all = [] {
    std::map<std::string, std::string, std::less<>> its{
        {"accumulate", "ziggurat_add_gradient()"},
        {"betas", "ziggurat_group.beta1 and ziggurat_group.beta2"},
        {"checkpoint_bandwidth", "\"bandwidth\" of ziggurat_save_begin()"},
        {"checkpoint_dir", "\"folder\" of ziggurat_save_checkpoint()"},
        {"checkpoint_stall_max", "\"stall_max\" of ziggurat_save_begin()"},
        {"clip", "ziggurat_gradient_norm() and ziggurat_step_options.grad_scale"},
        {"dtype", "ziggurat_memory.dtype"},
        {"eps", "ziggurat_group.eps"},
        {"load_partial", "null among \"parts\" of ziggurat_engine_load()"},
        {"load_rename", "\"parts\" of ziggurat_engine_load()"},
        {"lr", "ziggurat_group.learning_rate"},
        {"nproc", "\"world_size\" of ziggurat_runtime_create()"},
        {"param_groups", "ziggurat_param.group"},
        {"threads", "\"threads\" of ziggurat_runtime_create()"},
        {"weight_decay", "ziggurat_group.weight_decay"}};
    for (const char* const key : {"device",
                                  "device_memory",
                                  "durable_every",
                                  "durable_every_steps",
                                  "first_elements",
                                  "host_memory",
                                  "hpz",
                                  "initial_accumulator",
                                  "max_live_parameters",
                                  "max_reuse_distance",
                                  "optimizer",
                                  "param_persistence_threshold",
                                  "param_rounding",
                                  "pieces",
                                  "placement",
                                  "prefetch_bucket_size",
                                  "resume",
                                  "rounding",
                                  "run",
                                  "slots",
                                  "state_format",
                                  "state_rounding",
                                  "store",
                                  "wholes"})
      its[key] = fmt::format("\"{}\"", key);
    for (const char* const none : {"activation_checkpointing",
                                   "batch",
                                   "collectives",
                                   "force",
                                   "json",
                                   "min_loss_scale",
                                   "model",
                                   "profile",
                                   "quantized_gradients",
                                   "quantized_weights",
                                   "ranks_per_node",
                                   "reduce_bucket_size",
                                   "reduce_dtype",
                                   "shard_group",
                                   "speculate",
                                   "strategy",
                                   "tp",
                                   "trace",
                                   "tune",
                                   "warmup_max_lr",
                                   "zero_stage"})
      its[none];
    return its;
  }();
  return all;
}

std::string json_of(const std::string& value) {
  static const std::regex kNumber("-?[0-9]+(\\.[0-9]+)?(e-?[0-9]+)?");
  return std::regex_match(value, kNumber) ? value : fmt::format("\"{}\"", value);
}

/// Returns true if a message must be about a key that the caller gave, even one that means nothing
/// in C.
bool is_given_as_key(std::string_view name, std::string_view place) {
  return place.empty() || name == "betas" || name == "clip" || name == "eps" ||
         name == "param_groups" || name == "threads" || name == "weight_decay";
}

/// Returns in words of C what stands between backticks; nothing if it is advice that a C caller
/// cannot follow.
std::optional<std::string> translated(const std::string& quoted, bool is_advice) {
  const std::size_t equals = quoted.find('=');
  const auto found = places().find(std::string_view(quoted).substr(0, equals));
  if (found == places().end()) return "`" + quoted + "`";
  const auto& [name, place] = *found;
  const std::string value = equals == std::string::npos ? "" : quoted.substr(equals + 1);
  const std::string key = fmt::format("\"{}\"", name);
  if (is_advice && place.empty()) return std::nullopt;
  if (place != key && (is_advice || !is_given_as_key(name, place))) return place;
  return value.empty() ? key : key + ": " + json_of(value);
}

/// Returns a piece with every quoted word in words of C; nothing if it advises something that a C
/// caller cannot do.
std::optional<std::string> spoken(std::string_view piece, bool is_advice) {
  std::string text;
  for (;;) {
    const std::size_t open = piece.find('`');
    const std::size_t close = open == std::string_view::npos ? open : piece.find('`', open + 1);
    if (close == std::string_view::npos) return text += piece;
    const std::string quoted(piece.substr(open + 1, close - open - 1));
    const std::optional<std::string> word = translated(quoted, is_advice);
    if (!word) return std::nullopt;
    text += piece.substr(0, open);
    text += *word;
    piece.remove_prefix(close + 1);
  }
}

/// Returns the verb with which advice begins, for the first advice that is left.
std::string verb_of(std::string_view piece) {
  for (const char* const verb : {"give ", "use ", "or ", "Give ", "Use "})
    if (piece.starts_with(verb)) return verb;
  return "";
}

/// Mends a text from which advice was left out: removes the comma behind a verb, and a verb without
/// any advice.
std::string mended(std::string text) {
  static const std::regex kNext(R"((: |; |\. )([Gg]ive |[Uu]se )(, or |, ))");
  static const std::regex kLast(R"((: |; |\. )([Gg]ive |[Uu]se |or )(?=\. |; |$))");
  text = std::regex_replace(text, kNext, "$1$2");
  return std::regex_replace(text, kLast, "");
}

}  // namespace

bool is_known_to_c(std::string_view name) { return places().contains(name); }

std::string in_c(std::string_view message) {
  if (message.find('`') == std::string_view::npos) return std::string(message);
  // Separates what a message says from what it advises, and one advice from the next.
  static const std::regex kBetween(": |; |, or |, |\\. (?=[A-Z])");
  const std::string all(message);
  std::string text;
  std::string between;
  std::size_t begin = 0;
  for (auto at = std::sregex_iterator(all.begin(), all.end(), kBetween);; ++at) {
    const bool is_last = at == std::sregex_iterator();
    const std::size_t end = is_last ? all.size() : static_cast<std::size_t>(at->position());
    const std::string piece = all.substr(begin, end - begin);
    if (const auto its = spoken(piece, /*is_advice=*/begin > 0)) {
      text += between + *its;
    } else if (between != ", " && between != ", or ") {
      if (const std::string verb = verb_of(piece); !verb.empty()) text += between + verb;
    }
    if (is_last) return mended(std::move(text));
    between = at->str();
    begin = end + between.size();
  }
}

}  // namespace ziggurat
