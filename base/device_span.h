// SPDX-License-Identifier: Apache-2.0
// base/device_span.h: elements in a device's memory. The CPU may not touch them, so these types
// give no access to them: a Device copies them, a Compute works on them (core/compute).
//
// An address is a number here; code that calls a driver makes a pointer of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "base/check.h"
#include "base/dtype.h"

namespace ziggurat {

template <class T>
class DeviceSpan {
 public:
  constexpr DeviceSpan() = default;
  constexpr DeviceSpan(std::uintptr_t address, std::size_t count) noexcept
      : address_(address), count_(count) {}

  constexpr operator DeviceSpan<const T>() const noexcept
    requires(!std::is_const_v<T>)
  {
    return {address_, count_};
  }

  constexpr std::uintptr_t address() const noexcept { return address_; }
  constexpr std::size_t size() const noexcept { return count_; }
  constexpr std::size_t size_bytes() const noexcept { return count_ * sizeof(T); }
  constexpr bool empty() const noexcept { return count_ == 0; }

  DeviceSpan subspan(std::size_t first, std::size_t elements) const noexcept {
    ZIGGURAT_CHECK(first <= count_ && elements <= count_ - first, "elements [{}, +{}) of {}", first,
                   elements, count_);
    return {address_ + first * sizeof(T), elements};
  }
  DeviceSpan first(std::size_t elements) const noexcept { return subspan(0, elements); }

  /// Returns the same memory as elements of another size.
  template <class U>
  DeviceSpan<U> as() const noexcept {
    return {address_, size_bytes() / sizeof(U)};
  }

 private:
  std::uintptr_t address_ = 0;
  std::size_t count_ = 0;
};

/// Returns the device memory of a range of addresses that the CPU can see too.
inline DeviceSpan<std::byte> device_span(std::span<std::byte> addresses) noexcept {
  return {reinterpret_cast<std::uintptr_t>(addresses.data()), addresses.size()};
}

/// Elements of a type that is known only at run time. Byte is std::byte or const std::byte.
template <class Byte>
struct TypedDeviceSpan {
  DType dtype = DType::kBFloat16;
  DeviceSpan<Byte> bytes{};

  std::size_t count() const noexcept { return bytes.size() / size_bytes(dtype); }
  TypedDeviceSpan subspan(std::size_t first, std::size_t elements) const noexcept {
    return {dtype, bytes.subspan(first * size_bytes(dtype), elements * size_bytes(dtype))};
  }
  operator TypedDeviceSpan<const std::byte>() const noexcept
    requires(!std::is_const_v<Byte>)
  {
    return {dtype, bytes};
  }
};

}  // namespace ziggurat
