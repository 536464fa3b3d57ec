// SPDX-License-Identifier: Apache-2.0
// integrations/measure/result_json.cc: writes results as JSON. Names have their units last, and GB
// is 1e9 bytes.
#include "integrations/measure/result_json.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace ziggurat::measure {
namespace {

using json = nlohmann::ordered_json;

constexpr int kVersion = 1;

template <class T>
json or_null(const std::optional<T>& value) {
  return value ? json(*value) : json(nullptr);
}

json to_json(const Flag& flag) {
  return {{"doubt", to_string(flag.doubt)}, {"refuses", flag.refuses}, {"text", flag.text}};
}

json flags_json(const std::vector<Flag>& flags) {
  json all = json::array();
  for (const Flag& flag : flags) all.push_back(to_json(flag));
  return all;
}

json latency_json(const Latencies& latency) {
  json buckets = json::array();
  for (const Latencies::Bucket& bucket : latency.buckets())
    buckets.push_back({bucket.from_us, bucket.to_us, bucket.count});
  return {{"count", latency.count()},
          {"p50_us", latency.quantile_us(0.5)},
          {"p99_us", latency.quantile_us(0.99)},
          {"p99_9_us", latency.quantile_us(0.999)},
          {"max_us", latency.max_us()},
          {"buckets_from_to_count", std::move(buckets)}};
}

json deadlines_json(const Deadlines& deadlines) {
  const double share = deadlines.units > 0 ? static_cast<double>(deadlines.missed) /
                                                 static_cast<double>(deadlines.units)
                                           : 0;
  return {{"units", deadlines.units},
          {"missed", deadlines.missed},
          {"missed_share", share},
          {"worst_late_s", deadlines.worst_late_s},
          {"stalled_s", deadlines.stalled_s},
          {"pace_gb_per_s", deadlines.pace_gb_per_s},
          {"unit_bytes", deadlines.unit_bytes}};
}

json round_json(const Measurement& round) {
  const std::vector<double> seconds = round.per_second();
  json object{{"seconds", round.seconds},
              {"read_bytes", round.read_bytes},
              {"write_bytes", round.write_bytes},
              {"gb_per_s", round.gb_per_s()},
              {"first_second_gb_per_s", seconds.empty() ? json(nullptr) : json(seconds.front())},
              {"last_second_gb_per_s", seconds.empty() ? json(nullptr) : json(seconds.back())},
              {"gb_per_second", seconds},
              {"gb_per_tenth_of_second", round.gb_per_tenth},
              {"latency", latency_json(round.latency)},
              {"cpu_s_per_gb", round.cpu_s_per_gb()},
              {"io_cpu_s", round.io_cpu_s},
              {"fill_cpu_s", round.fill_cpu_s},
              {"compute_cpu_s", round.compute_cpu_s},
              {"flush_s", round.flush_s},
              {"checked_pages", round.sample.pages},
              {"verified", round.sample.verified},
              {"wrong_pages", round.sample.wrong_pages}};
  if (round.deadlines) object["deadlines"] = deadlines_json(*round.deadlines);
  if (round.adam_gb_per_s) object["adam_beside_gb_per_s"] = *round.adam_gb_per_s;
  object["flags"] = flags_json(round.flags);
  return object;
}

json fio_json(const FioFigure& figure) {
  return {{"gb_per_s", figure.gb_per_s},
          {"cpu_s_per_gb", figure.cpu_s_per_gb},
          {"p50_us", figure.p50_us},
          {"p99_us", figure.p99_us},
          {"depth", figure.depth}};
}

json row_json(const Row& row) {
  json object{{"workload", key_of(row.workload)},
              {"title", to_string(row.workload)},
              {"about", about(row.workload)},
              {"refused", refused(row.flags())},
              {"gb_per_s", row.gb_per_s()},
              {"cpu_s_per_gb", row.cpu_s_per_gb()},
              {"fio_gb_per_s", or_null(row.fio_gb_per_s())},
              {"fio_cpu_s_per_gb", or_null(row.fio_cpu_s_per_gb())},
              {"fio_ratio", or_null(row.ratio())},
              {"fio_work", row.fio_work},
              {"flags", flags_json(row.flags())},
              {"rounds", json::array()},
              {"fio_rounds", json::array()}};
  for (const Measurement& round : row.rounds) object["rounds"].push_back(round_json(round));
  for (const FioFigure& figure : row.fio) object["fio_rounds"].push_back(fio_json(figure));
  return object;
}

json choice_json(const TuneChoice& choice) {
  return {{"block_bytes", choice.block_bytes},
          {"queue_depth", choice.depth},
          {"outstanding_bytes", choice.outstanding_bytes()},
          {"gb_per_s", choice.gb_per_s}};
}

json tune_json(const TuneResult& tuned) {
  json cells = json::array();
  for (const TuneCell& cell : tuned.cells) {
    cells.push_back({{"block_bytes", cell.block_bytes},
                     {"queue_depth", cell.depth},
                     {"read_gb_per_s", cell.read_gb_per_s},
                     {"write_gb_per_s", cell.write_gb_per_s},
                     {"mix_gb_per_s", cell.mix_gb_per_s}});
  }
  return {{"seconds", tuned.seconds},
          {"read", choice_json(tuned.read)},
          {"write", choice_json(tuned.write)},
          {"mix", choice_json(tuned.mix)},
          {"cells", std::move(cells)}};
}

json depths_json(const DepthChoices& depth) {
  return {{"read", depth[IoMix::kRead].best},
          {"write", depth[IoMix::kWrite].best},
          {"mix", depth[IoMix::kMix].best}};
}

json set_json(const SetResult& set, const ModelShape& model) {
  json drives = json::array();
  for (const DriveFacts& drive : set.drives) {
    drives.push_back({{"device", drive.device},
                      {"filesystem", drive.filesystem},
                      {"model", drive.model},
                      {"size_bytes", drive.size_bytes},
                      {"free_bytes", drive.free_bytes}});
  }
  json object{{"label", set.label},
              {"paths", set.paths},
              {"drives", std::move(drives)},
              {"engines", set.engines},
              {"file_bytes", set.file_bytes},
              {"written_bytes", set.written_bytes},
              {"block_bytes", set.block_bytes},
              {"queue_depth", depths_json(set.depth)},
              {"training_depth", set.training_depth()},
              {"fio", set.fio_how},
              {"optimizer_s_per_step", or_null(optimizer_seconds(set, model))},
              {"rows", json::array()}};
  for (const Row& row : set.rows) object["rows"].push_back(row_json(row));
  if (set.tune) object["tune"] = tune_json(*set.tune);
  return object;
}

double believed(const SetResult& set, Workload workload) {
  const Row* const row = set.find(workload);
  return row == nullptr || refused(row->flags()) ? 0 : row->gb_per_s();
}

DriveProfile drive_profile(const SetResult& set, const BenchResult& result) {
  DriveProfile drive;
  drive.path = std::filesystem::absolute(set.paths.front()).lexically_normal().string();
  drive.device = set.drives.front().device;
  drive.filesystem = set.drives.front().filesystem;
  drive.engine = set.engines.front();
  drive.measured_at = result.started_at;
  drive.read_gb_per_s = believed(set, Workload::kRead);
  drive.write_gb_per_s = believed(set, Workload::kWrite);
  drive.mix_gb_per_s = believed(set, Workload::kMix);
  drive.sweep_gb_per_s = believed(set, Workload::kSweepAdam);
  drive.block_bytes = set.block_bytes;
  drive.queue_depth = set.training_depth();
  if (set.tune) {
    const TuneChoice& best = set.tune->mix.depth > 0 ? set.tune->mix : set.tune->read;
    drive.block_bytes = best.block_bytes;
    drive.queue_depth = best.depth;
  }
  for (const Row& row : set.rows) {
    for (const Flag& flag : row.flags()) {
      const std::string name(to_string(flag.doubt));
      if (std::find(drive.flags.begin(), drive.flags.end(), name) == drive.flags.end())
        drive.flags.push_back(name);
    }
  }
  return drive;
}

}  // namespace

nlohmann::ordered_json to_json(const BenchResult& result) {
  json object{
      {"ziggurat_bench_io", kVersion},
      {"started_at", result.started_at},
      {"cpu_model", result.cpu_model},
      {"kernel", result.kernel},
      {"workers", result.workers},
      {"buffers", result.buffer_pages},
      {"seconds_per_row", result.seconds_per_row},
      {"rounds", result.rounds},
      {"gb", "1e9 bytes"},
      {"cpu_counted",
       "CPU is the user and system time of every thread of this process, without stamping what is "
       "written (fill) and without optimizer jobs (compute); for fio it is usr_cpu + sys_cpu"},
      {"checked",
       "32 transfers of each row, evenly over its time, were kept aside and compared byte for byte "
       "after the clocks had stopped; every record of a sweep with compute was verified by its "
       "checksum"},
      {"model",
       {{"name", result.model.name},
        {"params", result.model.params},
        {"units", result.model.units}}},
      {"adam_alone_gb_per_s", result.adam_alone_gb_per_s},
      {"degraded", result.degraded},
      {"wall_s", result.wall_s},
      {"sets", json::array()}};
  for (const SetResult& set : result.sets) object["sets"].push_back(set_json(set, result.model));
  return object;
}

MachineProfile updated_profile(MachineProfile known, const BenchResult& result) {
  known.cpu_model = result.cpu_model;
  known.kernel = result.kernel;
  known.host_adam_gb_per_s = result.adam_alone_gb_per_s;
  for (const SetResult& set : result.sets) {
    if (set.paths.size() != 1 || believed(set, Workload::kRead) <= 0) continue;
    known.set_drive(drive_profile(set, result));
    if (set.tune) known.aio = suggested_aio(*set.tune);
  }
  return known;
}

DeepSpeedAio suggested_aio(const TuneResult& tuned) {
  const TuneChoice& best = tuned.mix.depth > 0 ? tuned.mix : tuned.read;
  DeepSpeedAio aio;
  aio.block_size = best.block_bytes;
  aio.queue_depth = best.depth;
  return aio;
}

}  // namespace ziggurat::measure
