// SPDX-License-Identifier: Apache-2.0
// integrations/cli/run_state.cc: writes and reads a run's identity as words, and its blob as JSON.
#include "integrations/cli/run_state.h"

#include <fmt/format.h>

#include <charconv>
#include <nlohmann/json.hpp>

namespace ziggurat::cli {
namespace {

template <class Integer>
Integer parse_integer(const std::string& text, int base) {
  Integer number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, base);
  if (error != std::errc{} || end != text.data() + text.size()) throw std::out_of_range(text);
  return number;
}

std::map<std::string, std::string> words_of(const std::string& text) {
  std::map<std::string, std::string> words;
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t space = std::min(text.find(' ', at), text.size());
    const std::string word = text.substr(at, space - at);
    const std::size_t equals = word.find('=');
    if (equals != std::string::npos) words[word.substr(0, equals)] = word.substr(equals + 1);
    at = space + 1;
  }
  return words;
}

}  // namespace

std::string RunIdentity::text() const {
  return fmt::format("model={} data={:016x} seed={} batch={} accumulate={} context={}",
                     gpt::to_string(model), data_hash, seed, batch, accumulate, context);
}

RunIdentity RunIdentity::parse(const std::string& text) {
  const std::map<std::string, std::string> words = words_of(text);
  try {
    RunIdentity identity;
    identity.model = gpt::parse_model(words.at("model"));
    identity.data_hash = parse_integer<std::uint64_t>(words.at("data"), 16);
    identity.seed = parse_integer<std::uint64_t>(words.at("seed"), 10);
    identity.batch = parse_integer<std::int64_t>(words.at("batch"), 10);
    identity.accumulate = parse_integer<std::int64_t>(words.at("accumulate"), 10);
    identity.context = parse_integer<std::int64_t>(words.at("context"), 10);
    return identity;
  } catch (const std::exception&) {  // a word is missing or not valid
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("the state belongs to another trainer, because the identity of its run is '{}'",
                    text));
  }
}

bool RunIdentity::is_one(const std::string& text) {
  try {
    parse(text);
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::vector<std::byte> RunState::encode() const {
  nlohmann::json object{
      {"version", 1}, {"steps_done", steps_done}, {"attempts", attempts}, {"settings", settings}};
  if (loss_scale) {
    object["loss_scale"] = {{"scale", loss_scale->scale},
                            {"hysteresis_left", loss_scale->hysteresis_left},
                            {"steps_since_overflow", loss_scale->steps_since_overflow}};
  }
  if (best) object["best"] = {{"step", best->step}, {"value", best->value}};
  const std::string text = object.dump();
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

RunState RunState::decode(std::span<const std::byte> blob) {
  try {
    const auto* text = reinterpret_cast<const char*>(blob.data());
    const nlohmann::json object = nlohmann::json::parse(text, text + blob.size());
    if (object.at("version") != 1) throw std::out_of_range("version");
    RunState state;
    object.at("steps_done").get_to(state.steps_done);
    // Older versions skipped no attempt.
    state.attempts = object.value("attempts", state.steps_done);
    object.at("settings").get_to(state.settings);
    if (object.contains("loss_scale")) {
      const nlohmann::json& scale = object["loss_scale"];
      state.loss_scale = {
          .scale = scale.at("scale").get<double>(),
          .hysteresis_left = scale.at("hysteresis_left").get<std::uint64_t>(),
          .steps_since_overflow = scale.at("steps_since_overflow").get<std::uint64_t>()};
    }
    if (object.contains("best")) {
      const nlohmann::json& best = object["best"];
      state.best = {.step = best.at("step").get<std::uint64_t>(),
                    .value = best.at("value").get<double>()};
    }
    return state;
  } catch (const std::exception& error) {
    throw Error(ErrorCode::kDataLoss,
                fmt::format("the store's run state ({} bytes) was not written by this trainer: {}",
                            blob.size(), error.what()));
  }
}

std::vector<std::string> differences(const ChangeableSettings& before,
                                     const ChangeableSettings& now) {
  std::vector<std::string> lines;
  for (const auto& [key, value] : now) {
    const auto found = before.find(key);
    if (found != before.end() && found->second != value) {
      lines.push_back(fmt::format("{} {} -> {}", key, found->second, value));
    }
  }
  return lines;
}

}  // namespace ziggurat::cli
