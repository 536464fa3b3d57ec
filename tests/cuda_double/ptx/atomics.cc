// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/atomics.cc: atom and red, PTX ISA 9.7.13.
#include <algorithm>

#include "tests/cuda_double/ptx/handlers.h"
#include "tests/cuda_double/ptx/memory_access.h"
#include "tests/cuda_double/ptx/nan.h"
#include "tests/cuda_double/ptx/thread.h"
#include "tests/cuda_double/ptx/types.h"

namespace ziggurat::cuda_double::ptx {
namespace {

enum class Kind : std::uint8_t { kAdd, kMin, kMax, kAnd, kOr, kXor, kExch, kCas, kInc, kDec };
constexpr const char* kNames[] = {"add", "min",  "max", "and", "or",
                                  "xor", "exch", "cas", "inc", "dec"};

template <class T>
T updated(Kind kind, T old, T b, T c) {
  using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t,
                                  std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t>>;
  const auto of = [](T value) { return std::bit_cast<Bits>(value); };
  const auto to = [](Bits bits) { return std::bit_cast<T>(bits); };
  switch (kind) {
    case Kind::kAdd:
      if constexpr (std::is_floating_point_v<T>) return canonical(old + b);
      return to(static_cast<Bits>(of(old) + of(b)));
    case Kind::kMin: return std::min(old, b);
    case Kind::kMax: return std::max(old, b);
    case Kind::kAnd: return to(of(old) & of(b));
    case Kind::kOr: return to(of(old) | of(b));
    case Kind::kXor: return to(of(old) ^ of(b));
    case Kind::kExch: return b;
    case Kind::kCas: return of(old) == of(b) ? c : old;
    case Kind::kInc: return of(old) >= of(b) ? T{0} : to(static_cast<Bits>(of(old) + 1));
    case Kind::kDec:
      return of(old) == 0 || of(old) > of(b) ? b : to(static_cast<Bits>(of(old) - 1));
  }
  return old;
}

/// The detail is the kind; detail2: the old value goes to d.
template <class T>
After update(Thread& thread, const Instruction& i) {
  const std::size_t first = i.detail2 != 0 ? 1 : 0;
  std::byte* bytes = access(thread, i, i.detail2 != 0 ? i.s[0] : i.d[0], sizeof(T), Use::kUpdate);
  T old;
  std::memcpy(&old, bytes, sizeof(T));
  const T b = get<T>(thread, i.s[first]);
  const T c = get<T>(thread, i.s[first + 1]);
  const T result = updated(static_cast<Kind>(i.detail), old, b, c);
  std::memcpy(bytes, &result, sizeof(T));
  if (i.detail2 != 0) put(thread, i.d[0], old);
  return After::kGoOn;
}

}  // namespace

Handler atomic_handler(const Opcode& opcode, Instruction& instruction) {
  const bool returns = opcode.base() == "atom";
  if (!returns && opcode.base() != "red") return nullptr;
  instruction.detail2 = returns ? 1 : 0;
  instruction.space = Space::kGeneric;
  bool known = false;
  for (std::size_t n = 1; n + 1 < opcode.parts.size(); ++n) {
    const std::string& part = opcode.parts[n];
    if (part == "global") instruction.space = Space::kGlobal;
    if (part == "shared" || part == "shared::cta") instruction.space = Space::kShared;
    const auto name = std::find(std::begin(kNames), std::end(kNames), part);
    if (name == std::end(kNames)) continue;
    instruction.detail = static_cast<std::uint8_t>(name - std::begin(kNames));
    known = true;
  }
  if (!known) return nullptr;
  const Kind kind = static_cast<Kind>(instruction.detail);
  const auto make = []<class T>(T) -> Handler { return &update<T>; };
  if (opcode.type().starts_with('f')) {
    return kind == Kind::kAdd || kind == Kind::kExch ? for_float(opcode.type(), make) : nullptr;
  }
  return for_integer(opcode.type(), make);
}

}  // namespace ziggurat::cuda_double::ptx
