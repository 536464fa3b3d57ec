// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/comparisons.cc: comparison and selection, PTX ISA 9.7.6.
#include <cmath>
#include <type_traits>

#include "tests/cuda_double/ptx/handlers.h"
#include "tests/cuda_double/ptx/thread.h"
#include "tests/cuda_double/ptx/types.h"

namespace ziggurat::cuda_double::ptx {
namespace {

enum class Compare : std::uint8_t {
  kEq,
  kNe,
  kLt,
  kLe,
  kGt,
  kGe,
  kEqu,
  kNeu,
  kLtu,
  kLeu,
  kGtu,
  kGeu,
  kNum,
  kNan
};
constexpr const char* kNames[] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                                  "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};
enum class Combine : std::uint8_t { kNone, kAnd, kOr, kXor };

template <class T>
bool compare(Compare how, T a, T b) {
  bool unordered = false;
  if constexpr (std::is_floating_point_v<T>) unordered = std::isnan(a) || std::isnan(b);
  switch (how) {
    case Compare::kEq: return !unordered && a == b;
    case Compare::kNe: return !unordered && a != b;
    case Compare::kLt: return a < b;
    case Compare::kLe: return a <= b;
    case Compare::kGt: return a > b;
    case Compare::kGe: return a >= b;
    case Compare::kEqu: return unordered || a == b;
    case Compare::kNeu: return unordered || a != b;
    case Compare::kLtu: return unordered || a < b;
    case Compare::kLeu: return unordered || a <= b;
    case Compare::kGtu: return unordered || a > b;
    case Compare::kGeu: return unordered || a >= b;
    case Compare::kNum: return !unordered;
    case Compare::kNan: return unordered;
  }
  return false;
}

bool combine(Combine how, bool a, bool b) {
  switch (how) {
    case Combine::kAnd: return a && b;
    case Combine::kOr: return a || b;
    case Combine::kXor: return a != b;
    case Combine::kNone: break;
  }
  return a;
}

template <class T>
After set_predicate(Thread& thread, const Instruction& i) {
  const bool result =
      compare(static_cast<Compare>(i.detail), get<T>(thread, i.s[0]), get<T>(thread, i.s[1]));
  if (i.detail2 == 0) {
    put(thread, i.d[0], result);
    put(thread, i.d[1], !result);
    return After::kGoOn;
  }
  const auto how = static_cast<Combine>(i.detail2 & 0xf);
  const bool other = get<bool>(thread, i.s[2]) != ((i.detail2 & 0x10) != 0);
  put(thread, i.d[0], combine(how, result, other));
  put(thread, i.d[1], combine(how, !result, other));
  return After::kGoOn;
}

/// set: all ones, or 1.0f, where setp has true.
template <class T, bool kFloat>
After set_value(Thread& thread, const Instruction& i) {
  const bool result =
      compare(static_cast<Compare>(i.detail), get<T>(thread, i.s[0]), get<T>(thread, i.s[1]));
  if constexpr (kFloat) {
    put(thread, i.d[0], result ? 1.0f : 0.0f);
  } else {
    put(thread, i.d[0], result ? ~std::uint32_t{0} : 0u);
  }
  return After::kGoOn;
}

After select(Thread& thread, const Instruction& i) {
  const bool first = get<bool>(thread, i.s[2]);
  put(thread, i.d[0], get<std::uint64_t>(thread, i.s[first ? 0 : 1]));
  return After::kGoOn;
}

/// slct: the first if the third is at least zero.
template <class T>
After select_by_sign(Thread& thread, const Instruction& i) {
  const bool first = get<T>(thread, i.s[2]) >= 0;
  put(thread, i.d[0], get<std::uint64_t>(thread, i.s[first ? 0 : 1]));
  return After::kGoOn;
}

bool read_comparison(const Opcode& opcode, Instruction& instruction) {
  // lo, ls, hi and hs are lt, le, gt and ge of unsigned types.
  const std::string& name = opcode.parts[1];
  const std::string plain = name == "lo"   ? "lt"
                            : name == "ls" ? "le"
                            : name == "hi" ? "gt"
                            : name == "hs" ? "ge"
                                           : name;
  for (std::uint8_t n = 0; n < std::size(kNames); ++n) {
    if (plain != kNames[n]) continue;
    instruction.detail = n;
    return true;
  }
  return false;
}

template <class Make>
Handler for_any(const std::string& type, Make make) {
  const Handler handler = for_integer(type, make);
  return handler != nullptr ? handler : for_float(type, make);
}

}  // namespace

Handler comparison_handler(const Opcode& opcode, Instruction& instruction) {
  const std::string& base = opcode.base();
  const std::string& type = opcode.type();
  const std::size_t parts = opcode.parts.size();
  if (base == "selp" && parts == 2) return &select;
  if (base == "slct" && parts == 3) {
    return type == "s32"   ? &select_by_sign<std::int32_t>
           : type == "f32" ? &select_by_sign<float>
                           : Handler{nullptr};
  }
  if (base == "setp" && (parts == 3 || parts == 4) && read_comparison(opcode, instruction)) {
    if (parts == 4) {
      const std::string& how = opcode.parts[2];
      const Combine combine = how == "and"   ? Combine::kAnd
                              : how == "or"  ? Combine::kOr
                              : how == "xor" ? Combine::kXor
                                             : Combine::kNone;
      if (combine == Combine::kNone) return nullptr;
      instruction.detail2 |= static_cast<std::uint8_t>(combine);
    } else {
      instruction.detail2 = 0;
    }
    return for_any(type, []<class T>(T) -> Handler { return &set_predicate<T>; });
  }
  if (base == "set" && parts == 4 && read_comparison(opcode, instruction)) {
    const bool as_float = opcode.parts[2] == "f32";
    if (!as_float && opcode.parts[2] != "u32" && opcode.parts[2] != "s32") return nullptr;
    return for_any(type, [as_float]<class T>(T) -> Handler {
      return as_float ? &set_value<T, true> : &set_value<T, false>;
    });
  }
  return nullptr;
}

}  // namespace ziggurat::cuda_double::ptx
