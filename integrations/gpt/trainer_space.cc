// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/trainer_space.cc: cuts the trainer's buffer into its arrays.
#include "integrations/gpt/trainer_space.h"

#include <algorithm>

namespace ziggurat::gpt {

TrainerSpace TrainerSpace::carve(const ModelConfig& model, const RunShape& shape,
                                 std::size_t threads, Carver& carver) {
  const RowShare rows = shape.row_share(model);
  const auto micro_batches = static_cast<std::size_t>(shape.accumulate);
  TrainerSpace space{};
  space.stream.resize(static_cast<std::size_t>(model.layers + 1));
  for (auto& layer : space.stream) {
    for (std::size_t k = 0; k < micro_batches; ++k)
      layer.push_back(carver.take(model.dtype, rows.own * model.width));
  }
  const bool checkpointing = shape.checkpointing == ActivationCheckpointing::kBlock;
  const BlockActivations shared =
      checkpointing ? BlockActivations::carve(model, rows, carver) : BlockActivations{};
  space.activations.resize(static_cast<std::size_t>(model.layers));
  for (auto& layer : space.activations) {
    for (std::size_t k = 0; k < micro_batches; ++k) {
      layer.push_back(checkpointing ? shared : BlockActivations::carve(model, rows, carver));
    }
  }
  space.head = HeadActivations::carve(model, rows, carver);
  space.d_rows = carver.take(model.dtype, rows.all * model.width);
  if (rows.own != rows.all) {
    space.gathered = carver.take(model.dtype, rows.all * model.width);
    std::uint64_t count = 0;
    for (const ElementRun& run : shared_runs(make_spec(model).units[block_unit(0)]))
      count += run.count();
    space.shared = carver.take<float>(static_cast<std::int64_t>(count));
  }

  const WideElements block = Block::wide_scratch(model, {shape.batch, shape.context});
  const WideElements head = Head::wide_scratch(model, rows);
  for (std::size_t i = 0; i < threads; ++i) {
    WorkerScratch own;
    own.tile = carver.take<float>(TiledMatmul::tile_elements_max());
    const std::int64_t wide_a = std::max(block.a, head.a);
    const std::int64_t wide_b = std::max(block.b, head.b);
    own.wide.a = {carver.take<float>(wide_a), static_cast<std::size_t>(wide_a)};
    own.wide.b = {carver.take<float>(wide_b), static_cast<std::size_t>(wide_b)};
    Attention::carve(model, shape.context, carver, own);
    space.scratch.push_back(own);
  }
  return space;
}

}  // namespace ziggurat::gpt
