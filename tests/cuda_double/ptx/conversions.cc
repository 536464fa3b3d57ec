// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/conversions.cc: cvt and cvta, PTX ISA 9.7.9.
#include <algorithm>
#include <cfenv>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "tests/cuda_double/ptx/handlers.h"
#include "tests/cuda_double/ptx/nan.h"
#include "tests/cuda_double/ptx/thread.h"
#include "tests/cuda_double/ptx/types.h"

namespace ziggurat::cuda_double::ptx {
namespace {

template <class T>
inline constexpr bool kSmallFloat = std::is_same_v<T, Half> || std::is_same_v<T, Bfloat>;
template <class T>
inline constexpr bool kIsFloat = std::is_floating_point_v<T> || kSmallFloat<T>;

/// Exact.
double widened(Half half) {
  const int exponent = half.bits >> 10 & 0x1f;
  const int mantissa = half.bits & 0x3ff;
  const double sign = (half.bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 0x1f) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}
double widened(Bfloat value) { return std::bit_cast<float>(std::uint32_t{value.bits} << 16); }
template <class T>
double widened(T value) {
  return static_cast<double>(value);
}

/// Rounds |value| to a float of few bits, on the integers that its bits are: `mantissa_bits` kept,
/// least exponent `least`. Nearest means ties to even.
std::uint16_t narrowed(double value, int mantissa_bits, int least, int exponent_max,
                       Rounding rounding) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return kNan16;
  const auto infinity = static_cast<std::uint16_t>(exponent_max << mantissa_bits);
  if (std::isinf(value)) return sign | infinity;
  const double magnitude = std::fabs(value);
  const int exponent = magnitude == 0 ? least : std::max(std::ilogb(magnitude), least);
  const double scaled = std::ldexp(magnitude, mantissa_bits - exponent);  // exact
  double whole = std::floor(scaled);
  const double rest = scaled - whole;
  if (rounding == Rounding::kNearest &&
      (rest > 0.5 || (rest == 0.5 && std::fmod(whole, 2.0) == 1.0))) {
    whole += 1;
  }
  // Carries from the mantissa run into the exponent by themselves.
  const auto bits = static_cast<std::int64_t>(whole) +
                    (static_cast<std::int64_t>(exponent - least) << mantissa_bits);
  const std::int64_t largest = rounding == Rounding::kZero ? infinity - 1 : infinity;
  return static_cast<std::uint16_t>(sign | std::min(bits, largest));
}

double rounded_to_whole(double value, Rounding rounding) {
  switch (rounding) {
    case Rounding::kNearest: return std::nearbyint(value);  // ties to even: the mode is nearest
    case Rounding::kZero: return std::trunc(value);
    case Rounding::kDown: return std::floor(value);
    case Rounding::kUp: return std::ceil(value);
  }
  return value;
}

/// "In float-to-integer conversions, NaN inputs": zero, unless the source is .f64 or the
/// destination has 64 bits; then only the highest bit is set. What is too large is clamped.
template <class To, class From>
To to_integer(From from, Rounding rounding) {
  const double value = widened(from);
  if (std::isnan(value)) {
    constexpr bool kZeroed = !std::is_same_v<From, double> && sizeof(To) < 8;
    using U = std::make_unsigned_t<To>;
    return kZeroed ? To{0} : static_cast<To>(U{1} << (8 * sizeof(To) - 1));
  }
  const double whole = rounded_to_whole(value, rounding);
  // 2^63 and 2^64 are doubles; the largest integers below them are not.
  const double beyond = std::ldexp(1.0, std::numeric_limits<To>::digits);
  if (whole >= beyond) return std::numeric_limits<To>::max();
  if (whole <= static_cast<double>(std::numeric_limits<To>::lowest())) {
    return std::numeric_limits<To>::lowest();
  }
  return static_cast<To>(whole);
}

template <class To, class From>
To in_mode(From from, Rounding rounding) {
  const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  volatile From source = from;
  std::fesetround(modes[static_cast<int>(rounding)]);
  volatile To result = static_cast<To>(static_cast<From>(source));
  std::fesetround(FE_TONEAREST);
  return result;
}

template <class To, class From>
To to_float(From from, Rounding rounding) {
  if constexpr (std::is_same_v<To, Half>) {
    return {narrowed(widened(from), 10, -14, 0x1f, rounding)};
  } else if constexpr (std::is_same_v<To, Bfloat>) {
    return {narrowed(widened(from), 7, -126, 0xff, rounding)};
  } else if constexpr (kSmallFloat<From>) {
    return canonical(static_cast<To>(widened(from)));
  } else if constexpr (std::is_floating_point_v<From>) {
    return canonical(in_mode<To>(from, rounding));
  } else {
    return in_mode<To>(from, rounding);
  }
}

/// .sat of floats: to [0, 1], "NaN results are flushed to +0.0f".
template <class T>
T saturated(T value) {
  return value > 0 ? std::min(value, T{1}) : T{0};
}

template <class To, class From>
To saturated_integer(From from) {
  if (std::cmp_less(from, std::numeric_limits<To>::lowest())) {
    return std::numeric_limits<To>::lowest();
  }
  if (std::cmp_greater(from, std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
  return static_cast<To>(from);
}

template <class To, class From>
After convert(Thread& thread, const Instruction& i) {
  const From from = get<From>(thread, i.s[0]);
  const auto rounding = static_cast<Rounding>(i.detail & 0xf);
  const bool saturates = i.detail2 != 0;
  if constexpr (kIsFloat<From> && !kIsFloat<To>) {
    put(thread, i.d[0], to_integer<To>(from, rounding));
  } else if constexpr (kIsFloat<To>) {
    To result;
    if constexpr (std::is_floating_point_v<From> && std::is_same_v<To, From>) {
      // cvt.rni.f32.f32 and the like round to a whole number.
      result = canonical(
          static_cast<To>((i.detail & 0x10) != 0 ? rounded_to_whole(from, rounding) : from));
    } else {
      result = to_float<To>(from, rounding);
    }
    if constexpr (std::is_floating_point_v<To>) {
      if (saturates) result = saturated(result);
    }
    put(thread, i.d[0], result);
  } else {
    put(thread, i.d[0], saturates ? saturated_integer<To>(from) : static_cast<To>(from));
  }
  return After::kGoOn;
}

template <class Make>
Handler for_all(std::string_view type, Make make) {
  if (type == "u8" || type == "b8") return make(std::uint8_t{});
  if (type == "s8") return make(std::int8_t{});
  if (type == "f16") return make(Half{});
  if (type == "bf16") return make(Bfloat{});
  const Handler handler = for_integer(type, make);
  return handler != nullptr ? handler : for_float(type, make);
}

/// cvta: between a space's offsets and generic addresses. The detail is 1 for cvta.to.
After convert_address(Thread& thread, const Instruction& i) {
  const auto address = get<std::uint64_t>(thread, i.s[0]);
  if (i.space == Space::kGlobal) {
    put(thread, i.d[0], address);
    return After::kGoOn;
  }
  const std::uint64_t tag = generic(i.space, 0);
  if (i.detail == 0) {
    put(thread, i.d[0], address | tag);
    return After::kGoOn;
  }
  if (address >> kSpaceShift != static_cast<std::uint64_t>(i.space)) {
    throw Fault(cudaErrorInvalidAddressSpace, "an address is not of the space that cvta.to names");
  }
  put(thread, i.d[0], address & ~tag);
  return After::kGoOn;
}

Handler cvta_handler(const Opcode& opcode, Instruction& instruction) {
  const std::size_t to = opcode.has("to") ? 1 : 0;
  if (opcode.parts.size() != 3 + to || opcode.type() != "u64") return nullptr;
  const std::string& space = opcode.parts[1 + to];
  instruction.detail = static_cast<std::uint8_t>(to);
  if (space == "global" || space == "const") {
    instruction.space = Space::kGlobal;
  } else if (space == "shared" || space == "shared::cta") {
    instruction.space = Space::kShared;
  } else if (space == "local") {
    instruction.space = Space::kLocal;
  } else if (space == "param") {
    instruction.space = Space::kParam;
  } else {
    return nullptr;
  }
  return &convert_address;
}

}  // namespace

std::optional<Rounding> rounding_of(const Opcode& opcode, bool to_integer) {
  constexpr const char* kModes[] = {"rn", "rz", "rm", "rp"};
  for (std::uint8_t n = 0; n < std::size(kModes); ++n) {
    if (opcode.has(to_integer ? std::string(kModes[n]) + "i" : kModes[n])) {
      return static_cast<Rounding>(n);
    }
  }
  return std::nullopt;
}

Handler conversion_handler(const Opcode& opcode, Instruction& instruction) {
  if (opcode.base() == "cvta") return cvta_handler(opcode, instruction);
  if (opcode.base() != "cvt" || opcode.parts.size() < 3) return nullptr;
  const auto plain = rounding_of(opcode, false);
  const auto whole = rounding_of(opcode, true);
  const bool saturates = opcode.has("sat");
  const std::size_t modifiers = (plain || whole ? 1u : 0u) + (saturates ? 1u : 0u);
  if (opcode.parts.size() != 3 + modifiers) return nullptr;  // .ftz, .relu, two sources
  const auto rounding =
      static_cast<std::uint8_t>(whole.value_or(plain.value_or(Rounding::kNearest)));
  instruction.detail = static_cast<std::uint8_t>(rounding | (whole ? 0x10 : 0));
  instruction.detail2 = saturates ? 1 : 0;
  const std::string& from = opcode.type();
  return for_all(opcode.parts[opcode.parts.size() - 2], [&from]<class To>(To) -> Handler {
    return for_all(from, []<class From>(From) -> Handler { return &convert<To, From>; });
  });
}

}  // namespace ziggurat::cuda_double::ptx
