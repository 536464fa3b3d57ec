// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/floats.cc: floating-point arithmetic, PTX ISA 9.7.3.
//
// Only what IEEE 754 specifies: .approx, .full and .ftz are not known here, and a kernel that has
// them does not run. g++ compiles this without contraction, for SSE: each operation rounds once.
#include <cfenv>
#include <cmath>

#include "tests/cuda_double/ptx/handlers.h"
#include "tests/cuda_double/ptx/nan.h"
#include "tests/cuda_double/ptx/thread.h"
#include "tests/cuda_double/ptx/types.h"

namespace ziggurat::cuda_double::ptx {
namespace {

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return a + b;
  }
};
struct Subtract {
  template <class T>
  T operator()(T a, T b) const {
    return a - b;
  }
};
struct Multiply {
  template <class T>
  T operator()(T a, T b) const {
    return a * b;
  }
};
struct Divide {
  template <class T>
  T operator()(T a, T b) const {
    return a / b;
  }
};
struct SquareRoot {
  template <class T>
  T operator()(T a) const {
    return std::sqrt(a);
  }
};
struct Reciprocal {
  template <class T>
  T operator()(T a) const {
    return T{1} / a;
  }
};
/// "If one of the inputs is NaN, then the other input is used as the result"; "+0.0 > -0.0".
struct Smaller {
  template <class T>
  T operator()(T a, T b) const {
    if (std::isnan(a)) return b;
    if (std::isnan(b)) return a;
    if (a == b) return std::signbit(a) ? a : b;
    return a < b ? a : b;
  }
};
struct Larger {
  template <class T>
  T operator()(T a, T b) const {
    if (std::isnan(a)) return b;
    if (std::isnan(b)) return a;
    if (a == b) return std::signbit(a) ? b : a;
    return a > b ? a : b;
  }
};

int mode_of(std::uint8_t detail) {
  switch (static_cast<Rounding>(detail)) {
    case Rounding::kZero: return FE_TOWARDZERO;
    case Rounding::kDown: return FE_DOWNWARD;
    case Rounding::kUp: return FE_UPWARD;
    case Rounding::kNearest: break;
  }
  return FE_TONEAREST;
}

template <class T, class F>
After binary(Thread& thread, const Instruction& i) {
  put(thread, i.d[0], canonical(F()(get<T>(thread, i.s[0]), get<T>(thread, i.s[1]))));
  return After::kGoOn;
}
template <class T, class F>
After unary(Thread& thread, const Instruction& i) {
  put(thread, i.d[0], canonical(F()(get<T>(thread, i.s[0]))));
  return After::kGoOn;
}
/// Rounds as the detail says. Volatile: the compiler knows nothing of modes.
template <class T, class F>
After binary_rounded(Thread& thread, const Instruction& i) {
  volatile T a = get<T>(thread, i.s[0]);
  volatile T b = get<T>(thread, i.s[1]);
  std::fesetround(mode_of(i.detail));
  volatile T result = F()(static_cast<T>(a), static_cast<T>(b));
  std::fesetround(FE_TONEAREST);
  put(thread, i.d[0], canonical(static_cast<T>(result)));
  return After::kGoOn;
}
template <class T>
After fused(Thread& thread, const Instruction& i) {
  const T a = get<T>(thread, i.s[0]);
  const T b = get<T>(thread, i.s[1]);
  put(thread, i.d[0], canonical(std::fma(a, b, get<T>(thread, i.s[2]))));
  return After::kGoOn;
}

/// min.NaN: "the result is canonical NaN if either of the inputs is NaN".
template <class F>
After extreme_with_nan(Thread& thread, const Instruction& i) {
  const auto a = get<float>(thread, i.s[0]);
  const auto b = get<float>(thread, i.s[1]);
  const bool nan = std::isnan(a) || std::isnan(b);
  put(thread, i.d[0], nan ? std::bit_cast<float>(kNan32) : F()(a, b));
  return After::kGoOn;
}

/// "For neg.f32, NaN input yields unspecified NaN. For neg.f64, NaN input is passed through
/// unchanged." abs the same.
After negate32(Thread& thread, const Instruction& i) {
  const auto a = get<float>(thread, i.s[0]);
  put(thread, i.d[0], std::isnan(a) ? std::bit_cast<float>(kUnspecified32) : -a);
  return After::kGoOn;
}
After absolute32(Thread& thread, const Instruction& i) {
  const auto a = get<float>(thread, i.s[0]);
  put(thread, i.d[0], std::isnan(a) ? std::bit_cast<float>(kUnspecified32) : std::fabs(a));
  return After::kGoOn;
}
After negate64(Thread& thread, const Instruction& i) {
  const auto a = get<double>(thread, i.s[0]);
  put(thread, i.d[0], std::isnan(a) ? a : -a);
  return After::kGoOn;
}
After absolute64(Thread& thread, const Instruction& i) {
  const auto a = get<double>(thread, i.s[0]);
  put(thread, i.d[0], std::isnan(a) ? a : std::fabs(a));
  return After::kGoOn;
}

/// d has the sign of the first operand and the magnitude of the second.
template <class Bits>
After copy_sign(Thread& thread, const Instruction& i) {
  constexpr Bits kSign = Bits{1} << (8 * sizeof(Bits) - 1);
  const Bits sign = get<Bits>(thread, i.s[0]) & kSign;
  put(thread, i.d[0], static_cast<Bits>((get<Bits>(thread, i.s[1]) & ~kSign) | sign));
  return After::kGoOn;
}

enum class Class : std::uint8_t { kFinite, kInfinite, kNumber, kNotANumber, kNormal, kSubnormal };
template <class T>
After test_property(Thread& thread, const Instruction& i) {
  const T a = get<T>(thread, i.s[0]);
  bool result = false;
  switch (static_cast<Class>(i.detail)) {
    case Class::kFinite: result = std::isfinite(a); break;
    case Class::kInfinite: result = std::isinf(a); break;
    case Class::kNumber: result = !std::isnan(a); break;
    case Class::kNotANumber: result = std::isnan(a); break;
    case Class::kNormal: result = std::isnormal(a) || a == 0; break;  // "normal or zero"
    case Class::kSubnormal: result = std::fpclassify(a) == FP_SUBNORMAL; break;
  }
  put(thread, i.d[0], result);
  return After::kGoOn;
}

template <class F>
Handler arithmetic(const Opcode& opcode, Instruction& instruction) {
  const auto rounding = rounding_of(opcode, false);
  const std::size_t plain = rounding ? 3 : 2;
  if (opcode.parts.size() != plain) return nullptr;
  instruction.detail = static_cast<std::uint8_t>(rounding.value_or(Rounding::kNearest));
  const bool nearest = instruction.detail == static_cast<std::uint8_t>(Rounding::kNearest);
  return for_float(opcode.type(), [nearest]<class T>(T) -> Handler {
    return nearest ? &binary<T, F> : &binary_rounded<T, F>;
  });
}

/// div, sqrt, rcp, fma: "rounding modifiers are required", and only .rn is done.
template <class Make>
Handler nearest_only(const Opcode& opcode, Make make) {
  if (opcode.parts.size() != 3 || !opcode.has("rn")) return nullptr;
  return for_float(opcode.type(), make);
}

template <class F>
Handler extreme(const Opcode& opcode) {
  if (opcode.parts.size() == 3 && opcode.parts[1] == "NaN" && opcode.type() == "f32") {
    return &extreme_with_nan<F>;
  }
  if (opcode.parts.size() != 2) return nullptr;
  return for_float(opcode.type(), []<class T>(T) -> Handler { return &binary<T, F>; });
}

Handler property(const Opcode& opcode, Instruction& instruction) {
  constexpr const char* kNames[] = {"finite",     "infinite", "number",
                                    "notanumber", "normal",   "subnormal"};
  for (std::uint8_t n = 0; n < std::size(kNames); ++n) {
    if (opcode.parts.size() != 3 || opcode.parts[1] != kNames[n]) continue;
    instruction.detail = n;
    return for_float(opcode.type(), []<class T>(T) -> Handler { return &test_property<T>; });
  }
  return nullptr;
}

}  // namespace

Handler float_handler(const Opcode& opcode, Instruction& instruction) {
  const std::string& base = opcode.base();
  const bool single = opcode.type() == "f32";
  if (!single && opcode.type() != "f64") return nullptr;
  if (base == "add") return arithmetic<Add>(opcode, instruction);
  if (base == "sub") return arithmetic<Subtract>(opcode, instruction);
  if (base == "mul") return arithmetic<Multiply>(opcode, instruction);
  if (base == "min") return extreme<Smaller>(opcode);
  if (base == "max") return extreme<Larger>(opcode);
  if (base == "testp") return property(opcode, instruction);
  if (base == "div") {
    return nearest_only(opcode, []<class T>(T) -> Handler { return &binary<T, Divide>; });
  }
  if (base == "sqrt") {
    return nearest_only(opcode, []<class T>(T) -> Handler { return &unary<T, SquareRoot>; });
  }
  if (base == "rcp") {
    return nearest_only(opcode, []<class T>(T) -> Handler { return &unary<T, Reciprocal>; });
  }
  if (base == "fma" || base == "mad") {
    return nearest_only(opcode, []<class T>(T) -> Handler { return &fused<T>; });
  }
  if (opcode.parts.size() != 2) return nullptr;
  if (base == "neg") return single ? &negate32 : &negate64;
  if (base == "abs") return single ? &absolute32 : &absolute64;
  if (base == "copysign") return single ? &copy_sign<std::uint32_t> : &copy_sign<std::uint64_t>;
  return nullptr;
}

}  // namespace ziggurat::cuda_double::ptx
