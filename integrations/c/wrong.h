// SPDX-License-Identifier: Apache-2.0
// integrations/c/wrong.h: makes the error for what a caller got wrong.
#pragma once

#include <string>

#include "base/error.h"

namespace ziggurat {

inline Error wrong(const std::string& message) { return {ErrorCode::kInvalidArgument, message}; }

}  // namespace ziggurat
