// SPDX-License-Identifier: Apache-2.0
// tests/core/saving_trainer.h: a rank that trains small_model(), whose records are more than a save
// holds at a time wherever they are.
#pragma once

#include "tests/core/checkpoint_rig.h"

namespace ziggurat::testing {

class SavingTrainer {
 public:
  SavingTrainer(Runtime& runtime, const EngineConfig& config)
      : rank_(runtime.ranks->rank()), rig_(runtime, model_, config) {}

  Engine& engine() noexcept { return *rig_.engine; }
  /// Makes the next step.
  StepResult step(const CheckpointRequest* checkpoint = nullptr) {
    pass_step(engine(), model_, engine().generation(), kPartLearningRate, 1.0F, 0, rank_);
    return engine().step(
        {.learning_rate = kPartLearningRate, .checkpoint = checkpoint, .blob = {}});
  }
  void end() {
    engine().finish_saves();
    engine().make_durable();
  }

 private:
  int rank_;
  ModelSpec model_ = small_model();
  RankRig rig_;
};

}  // namespace ziggurat::testing
