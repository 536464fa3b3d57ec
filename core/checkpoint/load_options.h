// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/load_options.h: what of a state is loaded.
#pragma once

namespace ziggurat {

struct LoadOptions {
  /// Masters alone: training begins at step 0 with moments of zero.
  bool weights_only = false;
};

}  // namespace ziggurat
