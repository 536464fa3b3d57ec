// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/integers.cc: integer arithmetic, PTX ISA 9.7.1.
#include <algorithm>
#include <bit>
#include <type_traits>

#include "tests/cuda_double/ptx/handlers.h"
#include "tests/cuda_double/ptx/thread.h"
#include "tests/cuda_double/ptx/types.h"

namespace ziggurat::cuda_double::ptx {
namespace {

// Sums and products wrap; 64 unsigned bits have the low bits of all of them.
struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  }
};
struct Subtract {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<std::uint64_t>(a) - static_cast<std::uint64_t>(b));
  }
};
struct MultiplyLow {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  }
};
struct MultiplyHigh {
  template <class T>
  T operator()(T a, T b) const {
    __extension__ using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return static_cast<T>((static_cast<Wide>(a) * static_cast<Wide>(b)) >> (8 * sizeof(T)));
  }
};
/// "Division by zero yields an unspecified, machine-specific value": all bits, as good as any.
struct Divide {
  template <class T>
  T operator()(T a, T b) const {
    if (b == 0) return static_cast<T>(~T{0});
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return Subtract()(T{0}, a);
    return static_cast<T>(a / b);
  }
};
struct Remainder {
  template <class T>
  T operator()(T a, T b) const {
    if (b == 0) return static_cast<T>(~T{0});
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
    return static_cast<T>(a % b);
  }
};
struct Smaller {
  template <class T>
  T operator()(T a, T b) const {
    return std::min(a, b);
  }
};
struct Larger {
  template <class T>
  T operator()(T a, T b) const {
    return std::max(a, b);
  }
};
struct Negate {
  template <class T>
  T operator()(T a) const {
    return Subtract()(T{0}, a);
  }
};
struct Absolute {
  template <class T>
  T operator()(T a) const {
    return a < 0 ? Subtract()(T{0}, a) : a;
  }
};
struct Population {
  template <class T>
  std::uint32_t operator()(T a) const {
    return static_cast<std::uint32_t>(std::popcount(a));
  }
};
struct LeadingZeros {
  template <class T>
  std::uint32_t operator()(T a) const {
    return static_cast<std::uint32_t>(std::countl_zero(a));
  }
};
struct ReverseBits {
  template <class T>
  T operator()(T a) const {
    T result = 0;
    for (std::size_t i = 0; i < 8 * sizeof(T); ++i) {
      result = static_cast<T>(result << 1 | (a >> i & 1));
    }
    return result;
  }
};
/// The highest bit that differs from the sign; none: all bits.
struct FindBit {
  template <class T>
  std::uint32_t operator()(T a) const {
    using U = std::make_unsigned_t<T>;
    const U bits = static_cast<U>(a < 0 ? ~a : a);
    return bits == 0 ? ~0u : static_cast<std::uint32_t>(8 * sizeof(T) - 1) - LeadingZeros()(bits);
  }
};

template <class T, class F>
After unary(Thread& thread, const Instruction& i) {
  put(thread, i.d[0], F()(get<T>(thread, i.s[0])));
  return After::kGoOn;
}
template <class T, class F>
After binary(Thread& thread, const Instruction& i) {
  put(thread, i.d[0], F()(get<T>(thread, i.s[0]), get<T>(thread, i.s[1])));
  return After::kGoOn;
}
template <class T, class F>
After multiply_add(Thread& thread, const Instruction& i) {
  const T product = F()(get<T>(thread, i.s[0]), get<T>(thread, i.s[1]));
  put(thread, i.d[0], Add()(product, get<T>(thread, i.s[2])));
  return After::kGoOn;
}
template <class T>
using Wider =
    std::conditional_t<sizeof(T) == 2,
                       std::conditional_t<std::is_signed_v<T>, std::int32_t, std::uint32_t>,
                       std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>>;

template <class T, bool kAdd>
After multiply_wide(Thread& thread, const Instruction& i) {
  using W = Wider<T>;
  W result =
      MultiplyLow()(static_cast<W>(get<T>(thread, i.s[0])), static_cast<W>(get<T>(thread, i.s[1])));
  if (kAdd) result = Add()(result, get<W>(thread, i.s[2]));
  put(thread, i.d[0], result);
  return After::kGoOn;
}
template <class T>
After absolute_difference_add(Thread& thread, const Instruction& i) {
  const T a = get<T>(thread, i.s[0]);
  const T b = get<T>(thread, i.s[1]);
  put(thread, i.d[0], Add()(a < b ? Subtract()(b, a) : Subtract()(a, b), get<T>(thread, i.s[2])));
  return After::kGoOn;
}
template <class T>
After extract_field(Thread& thread, const Instruction& i) {
  const T a = get<T>(thread, i.s[0]);
  const std::uint32_t width = 8 * sizeof(T);
  const std::uint32_t position = get<std::uint32_t>(thread, i.s[1]) & 0xff;
  const std::uint32_t length = get<std::uint32_t>(thread, i.s[2]) & 0xff;
  const auto bit = [&](std::uint32_t n) { return n < width && (a >> n & 1) != 0; };
  const std::uint32_t last = std::min(position + length - 1, width - 1);
  const bool sign = std::is_signed_v<T> && length != 0 && bit(last);
  std::uint64_t result = 0;
  for (std::uint32_t n = 0; n < width; ++n) {
    const bool set = n < length && position + n < width ? bit(position + n) : sign;
    result |= static_cast<std::uint64_t>(set) << n;
  }
  put(thread, i.d[0], static_cast<T>(result));
  return After::kGoOn;
}
template <class T>
After insert_field(Thread& thread, const Instruction& i) {
  const T a = get<T>(thread, i.s[0]);
  T result = get<T>(thread, i.s[1]);
  const std::uint32_t position = get<std::uint32_t>(thread, i.s[2]) & 0xff;
  const std::uint32_t length = get<std::uint32_t>(thread, i.s[3]) & 0xff;
  for (std::uint32_t n = 0; n < length && position + n < 8 * sizeof(T); ++n) {
    const T bit = static_cast<T>(T{1} << (position + n));
    result = (a >> n & 1) != 0 ? static_cast<T>(result | bit) : static_cast<T>(result & ~bit);
  }
  put(thread, i.d[0], result);
  return After::kGoOn;
}

template <class F>
Handler binary_of(const std::string& type) {
  return for_integer(type, []<class T>(T) -> Handler { return &binary<T, F>; });
}
template <class F>
Handler unsigned_unary(const std::string& type) {
  return for_bits(type, []<class T>(T) -> Handler { return &unary<T, F>; });
}

Handler multiply_handler(const Opcode& opcode) {
  const bool add = opcode.base() == "mad";
  const std::string& mode = opcode.parts.size() == 3 ? opcode.parts[1] : "";
  if (mode == "wide") {
    return for_integer(opcode.type(), [add]<class T>(T) -> Handler {
      if constexpr (sizeof(T) == 8 || sizeof(T) == 1) return nullptr;
      return add ? &multiply_wide<T, true> : &multiply_wide<T, false>;
    });
  }
  if (mode == "lo") {
    return for_integer(opcode.type(), [add]<class T>(T) -> Handler {
      return add ? &multiply_add<T, MultiplyLow> : &binary<T, MultiplyLow>;
    });
  }
  if (mode != "hi") return nullptr;
  return for_integer(opcode.type(), [add]<class T>(T) -> Handler {
    return add ? &multiply_add<T, MultiplyHigh> : &binary<T, MultiplyHigh>;
  });
}

}  // namespace

Handler integer_handler(const Opcode& opcode, Instruction&) {
  const std::string& base = opcode.base();
  const std::string& type = opcode.type();
  if (base == "mul" || base == "mad") return multiply_handler(opcode);
  if (opcode.parts.size() != 2) return nullptr;  // .sat, .cc, .shiftamt: not done
  if (base == "add") return binary_of<Add>(type);
  if (base == "sub") return binary_of<Subtract>(type);
  if (base == "div") return binary_of<Divide>(type);
  if (base == "rem") return binary_of<Remainder>(type);
  if (base == "min") return binary_of<Smaller>(type);
  if (base == "max") return binary_of<Larger>(type);
  if (base == "popc") return unsigned_unary<Population>(type);
  if (base == "clz") return unsigned_unary<LeadingZeros>(type);
  if (base == "brev") return unsigned_unary<ReverseBits>(type);
  const auto integer = [&](auto make) { return for_integer(type, make); };
  if (base == "neg") return integer([]<class T>(T) -> Handler { return &unary<T, Negate>; });
  if (base == "abs") return integer([]<class T>(T) -> Handler { return &unary<T, Absolute>; });
  if (base == "bfind") return integer([]<class T>(T) -> Handler { return &unary<T, FindBit>; });
  if (base == "sad") {
    return integer([]<class T>(T) -> Handler { return &absolute_difference_add<T>; });
  }
  if (base == "bfe") return integer([]<class T>(T) -> Handler { return &extract_field<T>; });
  if (base == "bfi") {
    return for_bits(type, []<class T>(T) -> Handler { return &insert_field<T>; });
  }
  return nullptr;
}

}  // namespace ziggurat::cuda_double::ptx
