// SPDX-License-Identifier: Apache-2.0
// integrations/cli/json_report.cc: writes each step over the closing brackets, followed by new
// ones, and turns figures into JSON.
#include "integrations/cli/json_report.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "core/engine/engine.h"
#include "integrations/cli/report.h"

namespace ziggurat::cli {
namespace {

using nlohmann::json;

const std::string kTail = "\n]}\n";

json counters_json(const CounterSnapshot& counters) {
  json object;
  for (std::size_t i = 0; i < kCounters; ++i) {
    const auto counter = static_cast<Counter>(i);
    object[std::string(to_string(counter))] = counters[counter];
  }
  return object;
}

json split_json(const StepSplit& split) {
  json waiting;
  for (std::size_t i = 0; i < kWaits; ++i)
    waiting[std::string(to_string(static_cast<Wait>(i)))] = split.wait_s[i];
  return {{"data_s", split.data_s},         {"forward_s", split.forward_s},
          {"backward_s", split.backward_s}, {"optimizer_s", split.optimizer_s},
          {"waiting_s", waiting},           {"other_s", split.other_s}};
}

json account_json(const Account& account) {
  json purposes;
  for (std::size_t i = 0; i < static_cast<std::size_t>(Purpose::kCount); ++i) {
    const auto purpose = static_cast<Purpose>(i);
    purposes[std::string(to_string(purpose))] = account.peak_bytes(purpose);
  }
  return {{"budget_bytes", account.capacity_bytes()},
          {"peak_bytes", account.peak_bytes()},
          {"peak_bytes_by_purpose", purposes}};
}

json ranks_json(const RunFacts& facts) {
  json ranks = json::array();
  for (std::size_t rank = 0; rank < facts.ranks.size(); ++rank) {
    const RankFigures& its = facts.ranks[rank];
    ranks.push_back({{"rank", rank},
                     {"step_s", its.step_s},
                     {"compute_s", its.compute_s},
                     {"waited_ranks_s", its.waited_ranks_s},
                     {"waited_tiers_s", its.waited_tiers_s},
                     {"waited_for_s", facts.waited_for_s[rank]},
                     {"sent_same_host_bytes", its.sent_here_bytes},
                     {"sent_other_hosts_bytes", its.sent_away_bytes},
                     {"sent_frame_bytes", its.sent_frame_bytes},
                     {"nvme_read_bytes", its.nvme_read_bytes},
                     {"nvme_write_bytes", its.nvme_write_bytes},
                     {"device_peak_bytes", its.device_peak_bytes},
                     {"host_peak_bytes", its.host_peak_bytes}});
  }
  return ranks;
}

}  // namespace

json to_json(const StepRecord& record) {
  json object{{"step", record.step},
              {"loss", record.loss},
              {"loss_bits", fmt::format("0x{:08x}", std::bit_cast<std::uint32_t>(record.loss))},
              {"learning_rate", record.learning_rate},
              {"grad_norm", record.grad_norm},
              {"clipped", record.clipped},
              {"durable_generation", record.durable_generation},
              {"wall_s", record.wall_s},
              {"split", split_json(record.split)},
              {"counters", counters_json(record.counters)}};
  if (record.held_out_loss) object["held_out_loss"] = *record.held_out_loss;
  if (record.loss_scale) {
    object["loss_scale"] = *record.loss_scale;
    object["skipped"] = record.skipped;
  }
  return object;
}

json to_json(const RunReport& report) {
  json object{
      {"first_step", report.first_step},
      {"steps", report.steps},
      {"wall_s", report.wall_s},
      {"finish_s", report.finish_s},
      {"tokens_per_s", report.tokens_per_s},
      {"mean_loss_last_10", report.mean_loss_last_10},
      {"durable_generation", report.durable_generation},
      {"tiers",
       {{"device", account_json(report.facts.device)},
        {"host", account_json(report.facts.host)},
        {"nvme", {{"store_bytes", report.facts.store_bytes}}}}},
      {"counters", counters_json(report.totals)},
      {"steady_step",
       {{"steps", report.steady.steps},
        {"wall_s", report.steady.wall_s},
        {"split", split_json(report.steady.split)},
        {"best", split_json(report.steady.best)},
        {"counters", counters_json(report.steady.counters)},
        {"speculated", report.steady.speculated},
        {"nvme_bytes_per_s", report.steady.nvme_bytes_per_s}}},
      {"bound",
       {{"seconds", report.bound.seconds},
        {"compute_s", report.bound.compute_s},
        {"nvme_s", report.bound.nvme_s},
        {"hidden_in_backward_s", report.bound.hidden_in_backward_s},
        {"nvme_bytes_per_s", report.bound_nvme_bytes_per_s},
        {"profiled_nvme_bytes_per_s", report.facts.profiled_nvme_bytes_per_s},
        {"limit", to_string(report.bound.limit)},
        {"share", report.share}}},
  };
  if (!report.facts.ranks.empty()) object["ranks"] = ranks_json(report.facts);
  if (report.held_out_loss) object["held_out_loss"] = *report.held_out_loss;
  if (report.facts.loss_scale) {
    object["loss_scale"] = *report.facts.loss_scale;
    object["skipped"] = report.skipped;
  }
  return object;
}

json to_json(const std::vector<SaveOutcome>& saves) {
  json all = json::array();
  for (const SaveOutcome& save : saves) {
    json its{{"step", save.step},
             {"directory", save.directory},
             {"size_bytes", save.size_bytes},
             {"seconds", save.seconds},
             {"stalled_s", save.stalled_s}};
    if (save.failure) its["failure"] = save.failure->what();
    all.push_back(std::move(its));
  }
  return all;
}

JsonReport::JsonReport(std::string path, const json& run)
    : path_(std::move(path)),
      fd_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) {
  if (fd_ < 0) throw system_error(errno, fmt::format("cannot create --json {}", path_));
  const std::string head = fmt::format("{{\"run\": {},\n\"steps\": [", run.dump());
  if (const int error = put(head + kTail); error != 0)
    throw system_error(error, fmt::format("cannot write --json {}", path_));
  end_ = head.size();
}

JsonReport::~JsonReport() {
  if (fd_ >= 0) ::close(fd_);
}

/// Writes `text` over the closing brackets. Returns 0, or the errno of the failure.
int JsonReport::put(const std::string& text) const {
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t result =
        ::pwrite(fd_, text.data() + done, text.size() - done, static_cast<off_t>(end_ + done));
    if (result < 0 && errno == EINTR) continue;
    if (result < 0) return errno;
    done += static_cast<std::size_t>(result);
  }
  return 0;
}

/// Ends the report after a failed write. Puts the closing brackets back, for which there was room
/// before.
void JsonReport::give_up(int error_number, bool training_goes_on) {
  whole_ = false;
  const bool valid =
      put(kTail) == 0 && ::ftruncate(fd_, static_cast<off_t>(end_ + kTail.size())) == 0;
  log().error("cannot write to --json {}: {}; the rest of the report is left out{}{}", path_,
              errno_text(error_number), training_goes_on ? ", and training goes on" : "",
              valid ? "" : "; the file is no longer valid JSON");
}

void JsonReport::add_step(const json& step) {
  if (!whole_) return;
  const std::string text = fmt::format("{}\n{}", first_ ? "" : ",", step.dump());
  if (const int error = put(text + kTail); error != 0)
    return give_up(error, /*training_goes_on=*/true);
  first_ = false;
  end_ += text.size();
}

void JsonReport::finish(const json& total) {
  if (!whole_) return;
  const std::string text = fmt::format("\n],\n\"total\": {}}}\n", total.dump(2));
  if (const int error = put(text); error != 0) return give_up(error, /*training_goes_on=*/false);
  // Some filesystems report only at close() that there was no room.
  const int error = ::close(std::exchange(fd_, -1)) == 0 ? 0 : errno;
  if (error == 0) return;
  whole_ = false;
  log().error("cannot close --json {}: {}; the report may be incomplete", path_, errno_text(error));
}

}  // namespace ziggurat::cli
