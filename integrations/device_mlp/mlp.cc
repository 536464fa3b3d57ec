// SPDX-License-Identifier: Apache-2.0
// integrations/device_mlp/mlp.cc: acquires, queues and releases, layer by layer. Between the bytes
// of a step and its loss nothing waits for the device, except the engine's calls on the stream.
#include "integrations/device_mlp/mlp.h"

#include <cmath>

#include "base/bytes.h"

namespace ziggurat::device_mlp {
namespace {

constexpr UnitId kEmbedding = 0;
constexpr UnitId kHidden = 1;
constexpr UnitId kHead = 2;

Shape hidden_shape(const MlpShape& shape) {
  return {.inputs = shape.context * shape.width, .outputs = shape.hidden};
}
Shape head_shape(const MlpShape& shape) { return {.inputs = shape.hidden, .outputs = kClasses}; }

template <class T>
T* pointer(DeviceSpan<T> span) noexcept {
  return reinterpret_cast<T*>(span.address());
}
const std::uint8_t* bytes_at(DeviceSpan<std::byte> span) noexcept {
  return reinterpret_cast<const std::uint8_t*>(span.address());
}

/// Acquires a unit's parameters for the layers that are queued until release().
class Acquired {
 public:
  Acquired(Engine& engine, Machine& machine, UnitId unit)
      : engine_(engine), machine_(machine), unit_(unit) {
    const TypedDeviceSpan<const std::byte> span = engine.acquire(unit, machine.stream());
    params_ = {.dtype = span.dtype, .values = pointer(span.bytes)};
  }
  void release() { engine_.release(unit_, machine_.stream()); }
  const Params& params() const noexcept { return params_; }

 private:
  Engine& engine_;
  Machine& machine_;
  UnitId unit_;
  Params params_{};
};

template <class Rule>
void run(Machine& machine, const Rule& rule, std::uint64_t count) {
  machine.run(Each<Rule>{.rule = rule, .count = count});
}

std::uint64_t mixed(std::uint64_t value) {
  value = (value ^ (value >> 33)) * 0xff51afd7ed558ccdU;
  return value ^ (value >> 29);
}

}  // namespace

ModelSpec mlp_model(const MlpShape& shape) {
  const auto linear = [](const std::string& name, const Shape& of) {
    const auto outputs = static_cast<std::int64_t>(of.outputs);
    const auto inputs = static_cast<std::int64_t>(of.inputs);
    return UnitSpec{
        .name = name,
        .params = {{.name = name + ".weight", .shape = {outputs, inputs}, .decay = true},
                   {.name = name + ".bias", .shape = {outputs}, .decay = false}}};
  };
  const auto width = static_cast<std::int64_t>(shape.width);
  return {.name = "mlp",
          .units = {{.name = "embedding",
                     .params = {{.name = "embedding.weight",
                                 .shape = {static_cast<std::int64_t>(kClasses), width},
                                 .decay = true}}},
                    linear("hidden", hidden_shape(shape)),
                    linear("head", head_shape(shape))}};
}

void initialize_mlp(UnitId unit, std::uint64_t first, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint64_t drawn = mixed((first + i) * 3 + unit + 1) % 2001;
    values[i] = (static_cast<float>(drawn) - 1000.0F) / 4000.0F;
  }
}

Mlp::Space Mlp::cut(const MlpShape& shape, std::uintptr_t base) {
  Space space;
  const auto take = [&](auto& part, std::size_t count) {
    using Part = std::remove_reference_t<decltype(part)>;
    part = Part(base + space.size_bytes, count);
    space.size_bytes = round_up(space.size_bytes + part.size_bytes(), 256);
  };
  take(space.tokens, shape.rows * shape.context);
  take(space.targets, shape.rows);
  take(space.x, shape.rows * shape.context * shape.width);
  take(space.h, shape.rows * shape.hidden);
  take(space.logits, shape.rows * kClasses);
  take(space.dh, shape.rows * shape.hidden);
  take(space.dx, shape.rows * shape.context * shape.width);
  take(space.probabilities, shape.rows);
  return space;
}

std::uint64_t Mlp::device_bytes(const MlpShape& shape) { return cut(shape, 0).size_bytes; }

Mlp::Mlp(Engine& engine, Device& device, Machine& machine, const MlpShape& shape)
    : engine_(engine),
      machine_(machine),
      shape_(shape),
      memory_(device.allocate(device_bytes(shape), Purpose::kActivations)),
      space_(cut(shape, reinterpret_cast<std::uintptr_t>(memory_.data()))) {}

void Mlp::load(std::span<const std::uint8_t> text, std::uint64_t step) {
  std::vector<std::byte> tokens;
  std::vector<std::byte> targets;
  for (std::size_t row = 0; row < shape_.rows; ++row) {
    const std::size_t at = mixed(step * shape_.rows + row + 1) % (text.size() - shape_.context);
    for (std::size_t i = 0; i < shape_.context; ++i)
      tokens.push_back(static_cast<std::byte>(text[at + i]));
    targets.push_back(static_cast<std::byte>(text[at + shape_.context]));
  }
  machine_.write(space_.tokens, tokens);
  machine_.write(space_.targets, targets);
}

void Mlp::forward() {
  Acquired embedding(engine_, machine_, kEmbedding);
  run(machine_,
      Embed{.tokens = bytes_at(space_.tokens),
            .table = embedding.params(),
            .width = shape_.width,
            .x = pointer(space_.x)},
      space_.x.size());
  embedding.release();
  Acquired hidden(engine_, machine_, kHidden);
  run(machine_,
      Linear{.shape = hidden_shape(shape_),
             .params = hidden.params(),
             .x = pointer(space_.x),
             .positive = true,
             .y = pointer(space_.h)},
      space_.h.size());
  hidden.release();
}

/// Runs forward and backward of the head in one; the gradient replaces the logits.
void Mlp::head() {
  const Shape shape = head_shape(shape_);
  Acquired head(engine_, machine_, kHead);
  run(machine_,
      Linear{.shape = shape,
             .params = head.params(),
             .x = pointer(space_.h),
             .positive = false,
             .y = pointer(space_.logits)},
      space_.logits.size());
  run(machine_,
      Softmax{.classes = kClasses,
              .targets = bytes_at(space_.targets),
              .scale = 1.0F / static_cast<float>(shape_.rows),
              .logits = pointer(space_.logits),
              .probabilities = pointer(space_.probabilities)},
      shape_.rows);
  const DeviceSpan<float> gradient = engine_.gradient(kHead, machine_.stream());
  run(machine_,
      LinearGradient{.shape = shape,
                     .x = pointer(space_.h),
                     .dy = pointer(space_.logits),
                     .rows = shape_.rows,
                     .gradient = pointer(gradient)},
      gradient.size());
  run(machine_,
      LinearBackward{.shape = shape,
                     .params = head.params(),
                     .dy = pointer(space_.logits),
                     .x = pointer(space_.h),
                     .gated = true,
                     .dx = pointer(space_.dh)},
      space_.dh.size());
  head.release();
  engine_.finish_gradient(kHead, machine_.stream());
}

void Mlp::backward() {
  const Shape shape = hidden_shape(shape_);
  Acquired hidden(engine_, machine_, kHidden);
  const DeviceSpan<float> gradient = engine_.gradient(kHidden, machine_.stream());
  run(machine_,
      LinearGradient{.shape = shape,
                     .x = pointer(space_.x),
                     .dy = pointer(space_.dh),
                     .rows = shape_.rows,
                     .gradient = pointer(gradient)},
      gradient.size());
  run(machine_,
      LinearBackward{.shape = shape,
                     .params = hidden.params(),
                     .dy = pointer(space_.dh),
                     .x = pointer(space_.x),
                     .gated = false,
                     .dx = pointer(space_.dx)},
      space_.dx.size());
  hidden.release();
  engine_.finish_gradient(kHidden, machine_.stream());

  const DeviceSpan<float> table = engine_.gradient(kEmbedding, machine_.stream());
  run(machine_,
      EmbedGradient{.tokens = bytes_at(space_.tokens),
                    .dx = pointer(space_.dx),
                    .width = shape_.width,
                    .rows = shape_.rows * shape_.context,
                    .gradient = pointer(table)},
      table.size());
  engine_.finish_gradient(kEmbedding, machine_.stream());
}

double Mlp::step(std::span<const std::uint8_t> text, std::uint64_t step, float learning_rate) {
  const StepOptions options{.learning_rate = learning_rate, .blob = {}};
  engine_.prepare_step(options);
  load(text, step);
  forward();
  head();
  backward();
  std::vector<float> probabilities(shape_.rows);
  machine_.read(std::as_writable_bytes(std::span(probabilities)),
                space_.probabilities.as<std::byte>());
  engine_.step(options);
  double loss = 0;
  for (const float p : probabilities) loss -= std::log(static_cast<double>(p));
  return loss / static_cast<double>(shape_.rows);
}

}  // namespace ziggurat::device_mlp
