// SPDX-License-Identifier: Apache-2.0
// tests/integrations/device_mlp_test.cc: a trainer whose layers run on the device: on a GPU, which
// is the double of the CUDA runtime with the kernels' own PTX, with the bits that it has on the
// CPU, and queued without waiting for it. ZIGGURAT_SEEDS: orders of streams to try (2).
#include <gmock/gmock.h>

#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

#include "base/bytes.h"
#include "base/error.h"
#include "integrations/device_mlp/mlp.h"
#include "integrations/device_mlp/program.h"
#include "tests/cuda_double/clockwork.h"
#include "tests/cuda_double/cuda_double.h"
#include "tests/support/scratch_directory.h"

namespace ziggurat::device_mlp {
namespace {

using cuda_double::Clockwork;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::ScratchDirectory;

std::vector<std::uint8_t> read_text() {
  std::ifstream file(ZIGGURAT_TEST_TEXT, std::ios::binary);
  std::stringstream all;
  all << file.rdbuf();
  const std::string read = all.str();
  return {read.begin(), read.end()};
}

const std::vector<std::uint8_t>& text() {
  static const std::vector<std::uint8_t> read = read_text();
  return read;
}

EngineConfig config_for(const MlpShape& shape, const std::string& directory,
                        const std::string& placement) {
  EngineConfig config;
  config.store = {{directory}};
  config.host_budget_bytes = 8 * kMiB;
  config.trainer_device_bytes = Mlp::device_bytes(shape);
  config.placement = parse_placement(placement);
  config.run_identity = "mlp";
  config.numerics_fingerprint = "device_mlp";
  return config;
}

constexpr std::uint64_t kDeviceBytes = 2 * kMiB;
constexpr const char* kOnDrive = "params=nvme,grads=host,optimizer=nvme";

std::vector<double> losses_on_cpu(const MlpShape& shape, std::uint64_t steps,
                                  const std::string& placement) {
  const ScratchDirectory directory;
  const auto runtime = Runtime::create({.threads = 1, .trace_path = ""});
  const auto device = HostDevice::create(runtime->reactor, kDeviceBytes);
  const auto engine = Engine::open(mlp_model(shape), config_for(shape, directory.path(), placement),
                                   *runtime, *device, initialize_mlp);
  const auto machine = make_machine(*device);
  Mlp mlp(*engine, *device, *machine, shape);
  std::vector<double> losses;
  for (std::uint64_t i = 0; i < steps; ++i) losses.push_back(mlp.step(text(), i, 0.01F));
  return losses;
}

/// An engine on the double's GPU, and a trainer that the test may listen in on.
struct GpuRig {
  explicit GpuRig(const MlpShape& shape, const EngineConfig& config)
      : runtime(Runtime::create({.threads = 1, .trace_path = ""})),
        device(CudaDevice::create(runtime->reactor, {.capacity_bytes = kDeviceBytes})),
        engine(Engine::open(mlp_model(shape), config, *runtime, *device, initialize_mlp)),
        machine(make_machine(*device, 64 * kKiB)) {}

  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<CudaDevice> device;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Machine> machine;
};

std::vector<double> losses_on_gpu(const MlpShape& shape, std::uint64_t steps,
                                  const std::string& placement, std::uint64_t seed) {
  cuda_double::reset(seed);
  std::vector<double> losses;
  {
    const ScratchDirectory directory;
    const GpuRig rig(shape, config_for(shape, directory.path(), placement));
    Mlp mlp(*rig.engine, *rig.device, *rig.machine, shape);
    for (std::uint64_t i = 0; i < steps; ++i) losses.push_back(mlp.step(text(), i, 0.01F));
  }
  EXPECT_THAT(cuda_double::report(), ::testing::IsEmpty()) << "seed " << seed;
  return losses;
}

TEST(DeviceMlp, LearnsToGuessTheNextByte) {
  const std::vector<double> losses = losses_on_cpu({.rows = 32}, 120, "all=host");
  EXPECT_GT(losses.front(), 5.4);  // of 256 bytes, it knows nothing
  double last = 0;
  for (std::size_t i = losses.size() - 10; i < losses.size(); ++i) last += losses[i] / 10;
  EXPECT_LT(last, 4.2);
}

TEST(DeviceMlp, HasTheSameBitsOnAGpuAndOnTheCpu) {
  const MlpShape shape;
  const char* const wanted = std::getenv("ZIGGURAT_SEEDS");
  const std::uint64_t seeds = wanted != nullptr ? std::strtoull(wanted, nullptr, 10) : 2;
  for (const char* const placement : {"all=host", kOnDrive}) {
    const std::vector<double> expected = losses_on_cpu(shape, 4, placement);
    for (std::uint64_t seed = 1; seed <= seeds; ++seed)
      EXPECT_EQ(losses_on_gpu(shape, 4, placement, seed), expected) << placement << ", " << seed;
  }
}

/// What `device_mlp` prints of its steps.
std::string program_output(const std::string& device, const std::string& store) {
  cuda_double::reset(3);
  std::ostringstream out;
  train({.text_path = ZIGGURAT_TEST_TEXT,
         .device = device,
         .store = store,
         .placement = "all=device,optimizer=device:1MiB,nvme",
         .device_memory_bytes = 4 * kMiB,
         .host_memory_bytes = 16 * kMiB,
         .steps = 3,
         .shape = {.rows = 4, .context = 4, .width = 16, .hidden = 64}},
        out);
  const std::string text = out.str();
  return text.substr(std::min(text.find("step 1 "), text.size()));
}

TEST(DeviceMlpProgram, PrintsTheSameLossBitsOnAGpuAndOnTheHostAndResumes) {
  const ScratchDirectory host;
  const ScratchDirectory gpu;
  const std::string expected = program_output("host", host.path());
  EXPECT_THAT(expected, AllOf(HasSubstr("step 1 loss 5."), HasSubstr("\nstep 3 loss 5.")));
  EXPECT_EQ(program_output("cuda:0", gpu.path()), expected);
  EXPECT_THAT(cuda_double::report(), ::testing::IsEmpty());
  EXPECT_EQ(program_output("auto", gpu.path()), "") << "all steps had been made";
}

TEST(DeviceMlpProgram, NamesWhatIsWrongWithItsFlags) {
  const auto refusal = [](const ProgramOptions& options) -> std::string {
    std::ostringstream out;
    try {
      train(options, out);
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  cuda_double::reset(1);
  EXPECT_THAT(refusal({.text_path = ZIGGURAT_TEST_TEXT, .device = "cuda:x"}),
              AllOf(HasSubstr("--device cuda:x"), HasSubstr("cuda:N")));
  EXPECT_THAT(refusal({.text_path = ZIGGURAT_TEST_TEXT, .device = "cuda:7"}), HasSubstr("7"));
  const ScratchDirectory store;
  EXPECT_THAT(refusal({.text_path = "/nowhere", .device = "host", .store = store.path()}),
              AllOf(HasSubstr("--text /nowhere"), HasSubstr("0 bytes")));
}

/// What a stream of the trainer's leaves out, counted from 0 in each step. Of the waits those for
/// an event: of acquire() and gradient() in turn; and the records of release() and
/// finish_gradient().
struct Mutant {
  std::set<int> waits{};
  std::set<int> records{};
};

class Careless final : public StreamRef {
 public:
  Careless(StreamRef& stream, const Mutant& mutant) : stream_(stream), mutant_(mutant) {}
  Event record() override {
    return mutant_.records.contains(records++) ? Event() : stream_.record();
  }
  void wait(const Event& event) override {
    if (event.state() != nullptr && mutant_.waits.contains(waits++)) return;
    stream_.wait(event);
  }
  int waits = 0;
  int records = 0;

 private:
  StreamRef& stream_;
  Mutant mutant_;
};

/// The trainer's machine, on which the GPU stands while a step's layers are queued.
class Held final : public Machine {
 public:
  Held(Machine& machine, Clockwork& clock, const Mutant& mutant)
      : machine_(machine), clock_(clock), stream_(machine.stream(), mutant) {}
  void run(const Each<Embed>& program) override { machine_.run(program); }
  void run(const Each<Linear>& program) override { machine_.run(program); }
  void run(const Each<Softmax>& program) override { machine_.run(program); }
  void run(const Each<LinearGradient>& program) override { machine_.run(program); }
  void run(const Each<LinearBackward>& program) override { machine_.run(program); }
  void run(const Each<EmbedGradient>& program) override { machine_.run(program); }
  StreamRef& stream() override { return stream_; }
  /// The targets come last before the layers.
  void write(DeviceSpan<std::byte> to, std::span<const std::byte> bytes) override {
    machine_.write(to, bytes);
    if (++writes_ % 2 == 0) clock_.hold();
  }
  void read(std::span<std::byte> to, DeviceSpan<const std::byte> bytes) override {
    waits = std::exchange(stream_.waits, 0);
    records = std::exchange(stream_.records, 0);
    clock_.go();
    machine_.read(to, bytes);
  }
  int waits = 0;  ///< of the last step
  int records = 0;

 private:
  Machine& machine_;
  Clockwork& clock_;
  Careless stream_;
  int writes_ = 0;
};

/// A head whose accumulator is not the others', so that none waits for another's to come back; and
/// units that leave the device as soon as they are released.
constexpr MlpShape kWideHead{.rows = 4, .context = 2, .width = 4, .hidden = 128};

struct HeldRun {
  std::vector<double> losses;
  std::vector<std::string> findings;
  int waits = 0;
  int records = 0;
};

HeldRun run_held(const Mutant& mutant) {
  cuda_double::reset(7, {.pace = cuda_double::Pace::kByHand});
  HeldRun run;
  Clockwork clock;
  {
    const ScratchDirectory directory;
    EngineConfig config = config_for(kWideHead, directory.path(), "all=host");
    config.max_reuse_distance = 0;
    const GpuRig rig(kWideHead, config);
    Held machine(*rig.machine, clock, mutant);
    try {
      Mlp mlp(*rig.engine, *rig.device, machine, kWideHead);
      for (std::uint64_t i = 0; i < 3; ++i) run.losses.push_back(mlp.step(text(), i, 0.01F));
    } catch (const Error&) {
      // A gradient of poison makes no step.
    }
    run.waits = machine.waits;
    run.records = machine.records;
  }
  run.findings = cuda_double::report();
  return run;
}

TEST(DeviceMlp, QueuesForwardAndBackwardWhileTheGpuStands) {
  const HeldRun run = run_held({});
  EXPECT_EQ(run.losses, losses_on_cpu(kWideHead, 3, "all=host"));
  EXPECT_THAT(run.findings, ::testing::IsEmpty());
  EXPECT_EQ(run.waits, 7);    // four units acquired, three gradients asked for
  EXPECT_EQ(run.records, 7);  // and released, and finished
}

/// Each order that a call makes is needed: without it the double sees a race.
TEST(DeviceMlp, EachWaitAndEachEventIsMissed) {
  const std::vector<std::pair<const char*, Mutant>> mutants{
      {"no wait in acquire()", {.waits = {0, 1, 2, 4}}},
      {"no wait in gradient()", {.waits = {3, 5, 6}}},
      {"no event in release()", {.records = {0, 1, 2, 4}}},
      {"no event in finish_gradient() of the head", {.records = {3}}},
      {"no event in finish_gradient() of the hidden layer", {.records = {5}}},
      {"no event in finish_gradient() of the embedding", {.records = {6}}}};
  for (const auto& [name, mutant] : mutants) {
    EXPECT_THAT(run_held(mutant).findings,
                ::testing::Contains(::testing::HasSubstr("nothing orders it after")))
        << name;
  }
}

}  // namespace
}  // namespace ziggurat::device_mlp
