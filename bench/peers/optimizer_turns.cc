// SPDX-License-Identifier: Apache-2.0
// bench/peers/optimizer_turns.cc: our side of optimizer_speed.py. It makes an AdamW step over all
// parameters for each line of standard input, and prints the step's seconds.
//   optimizer_turns fp32|mixed|bf16 PARAMS THREADS
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "base/runtime/worker_pool.h"
#include "base/topology/topology.h"
#include "optimizer/update.h"
#include "tiers/pool/host_mapping.h"

namespace ziggurat {
namespace {

constexpr std::size_t kTiles = 32;  // of a record
constexpr std::size_t kElements = kTiles * kTileElements;

/// The records of a row. fp32: parameters and gradients in fp32. mixed: fp32 masters, gradients and
/// parameters in bf16. bf16: everything in bf16.
class Records {
 public:
  Records(std::string_view row, std::size_t count)
      : format_(row == "bf16" ? StateFormat::kBf16 : StateFormat::kFp32),
        dtype_(row == "fp32" ? DType::kFloat32 : DType::kBFloat16),
        param_in_record_(row != "mixed"),
        record_bytes_(record_format(OptimizerKind::kAdamW, format_).record_bytes(kTiles)),
        item_bytes_(record_bytes_ + (param_in_record_ ? 1 : 2) * array_bytes()),
        count_(count),
        mapping_({.owner = "optimizer turns", .size_bytes = count * item_bytes_}) {}

  std::size_t count() const { return count_; }
  void fill(std::size_t index) {
    std::vector<float> values(kElements);
    for (std::size_t i = 0; i < kElements; ++i)
      values[i] = 0.02F * (static_cast<float>((i * 7919 + index) % 2001) * 1e-3F - 1.0F);
    const RecordView view = view_of(index);
    write_record(OptimizerKind::kAdamW, format_, values, view.record);
    std::byte* const grad = item(index).data() + record_bytes_;
    for (std::size_t i = 0; i < kElements; ++i) {
      if (dtype_ == DType::kFloat32) reinterpret_cast<float*>(grad)[i] = values[i] * 0.01F;
      if (dtype_ == DType::kBFloat16)
        reinterpret_cast<bf16*>(grad)[i] = float_to_bf16(values[i] * 0.01F);
    }
  }
  void update(const OptimizerStep& step, std::size_t index) {
    const DecayRun whole{0, kElements, true};
    update_record(step, view_of(index), {&whole, 1});
  }

 private:
  std::size_t array_bytes() const { return size_bytes(dtype_) * kElements; }
  std::span<std::byte> item(std::size_t index) const {
    return mapping_.bytes().subspan(index * item_bytes_, item_bytes_);
  }
  RecordView view_of(std::size_t index) const {
    const std::span<std::byte> all = item(index);
    RecordView view{.format = format_,
                    .record = all.first(record_bytes_),
                    .grad = {dtype_, all.subspan(record_bytes_, array_bytes())}};
    view.param.dtype = dtype_;
    if (format_ == StateFormat::kFp32) {  // an fp32 parameter is its own master
      const std::size_t at = param_in_record_ ? 0 : record_bytes_ + array_bytes();
      view.param.bytes = all.subspan(at, array_bytes());
    }
    return view;
  }

  StateFormat format_;
  DType dtype_;
  bool param_in_record_;
  std::size_t record_bytes_, item_bytes_, count_;
  HostMapping mapping_;
};

int run(std::string_view row, std::size_t params, std::size_t threads) {
  std::vector<int> cpus = Topology::discover().physical_cores;
  cpus.resize(std::min(threads, cpus.size()));
  WorkerPool workers({.threads = threads, .cpus = cpus});
  Records records(row, (params + kElements - 1) / kElements);
  workers.for_each(records.count(), [&](std::size_t i) { records.fill(i); });
  std::uint64_t t = 0;
  const auto seconds = [&] {
    const OptimizerStep step = OptimizerStep::make({.learning_rate = 1e-4F,
                                                    .beta1 = 0.9F,
                                                    .beta2 = 0.95F,
                                                    .eps = 1e-8F,
                                                    .weight_decay = 0.1F,
                                                    .grad_scale = 1.0F,
                                                    .t = ++t});
    const auto start = std::chrono::steady_clock::now();
    workers.for_each(threads, [&](std::size_t thread) {
      const std::size_t end = records.count() * (thread + 1) / threads;
      for (std::size_t i = records.count() * thread / threads; i < end; ++i)
        records.update(step, i);
    });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  seconds();
  fmt::print("ready {}\n", records.count() * kElements);
  std::fflush(stdout);
  while (std::getchar() == '\n') {
    fmt::print("{:.9f}\n", seconds());
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace ziggurat

int main(int argc, char** argv) {
  const std::string_view row = argc == 4 ? argv[1] : "";
  const std::size_t params = argc == 4 ? std::strtoull(argv[2], nullptr, 10) : 0;
  const std::size_t threads = argc == 4 ? std::strtoull(argv[3], nullptr, 10) : 0;
  if ((row != "fp32" && row != "mixed" && row != "bf16") || params == 0 || threads == 0) {
    std::fprintf(stderr,
                 "the arguments are wrong: see the header of bench/peers/optimizer_turns.cc\n");
    return 2;
  }
  return ziggurat::run(row, params, threads);
}
