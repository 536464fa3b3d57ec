// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/twins.cc: twins of block programs, found by the program's type, and the
// comparison with their PTX.
#include "tests/cuda_double/twins.h"

#include <cxxabi.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <span>

namespace ziggurat::cuda_double {
namespace {

/// Like the machine, for ever. Programs by their type as it is written.
struct Twins {
  std::map<std::string, Twin> by_program;
  std::map<std::string, const Twin*> by_kernel;  // those that were looked for
  Programs how = Programs::kPtx;
};
Twins& twins() {
  static Twins* const one = new Twins;
  return *one;
}

std::string demangled(const char* name) {
  int status = 0;
  char* const text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  const std::string result = status == 0 ? text : name;
  std::free(text);
  return result;
}

/// The P of "void ziggurat::internal::run_program<P>(P)"; empty for another kernel.
std::string program_of(const std::string& kernel) {
  const std::string text = demangled(kernel.c_str());
  if (!text.starts_with("void ziggurat::internal::run_program<")) return {};
  const std::size_t begin = text.rfind('(') + 1;
  return text.substr(begin, text.size() - 1 - begin);
}

/// Which NaN an operation makes differs between PTX (PTX ISA, 9.7.3) and the CPU; where a rule
/// specifies it, the comparison with the specification sees it.
bool same_but_for_nans(std::span<const std::byte> a, const std::byte* b) {
  std::size_t at = 0;
  for (; at + sizeof(float) <= a.size(); at += sizeof(float)) {
    if (std::memcmp(&a[at], b + at, sizeof(float)) == 0) continue;
    float ours = 0;
    float other = 0;
    std::memcpy(&ours, &a[at], sizeof(float));
    std::memcpy(&other, b + at, sizeof(float));
    if (!std::isnan(ours) || !std::isnan(other)) return false;
  }
  return std::equal(a.begin() + static_cast<std::ptrdiff_t>(at), a.end(), b + at);
}

bool covers(const std::vector<Access>& told, const Access& touched) {
  return std::any_of(told.begin(), told.end(), [&](const Access& one) {
    return one.range.contains(touched.range) && (one.writes || !touched.writes);
  });
}

}  // namespace

std::byte* TwinLaunch::touch(const void* device, std::size_t size_bytes, bool writes) const {
  constexpr std::size_t kPieceMax = 32;
  std::byte* first = nullptr;
  const auto begin = reinterpret_cast<std::uint64_t>(device);
  for (std::uint64_t at = begin; at < begin + size_bytes;) {
    std::uint64_t piece = kPieceMax;
    while (at % piece != 0 || at + piece > begin + size_bytes) piece /= 2;
    const auto bytes = static_cast<std::uint32_t>(piece);
    std::byte* const here = memory_.read(at, bytes);
    if (writes) memory_.write(at, bytes);
    if (at == begin) first = here;
    at += piece;
  }
  if (writes && twins().how == Programs::kCompared && size_bytes > 0)
    written_.push_back({first, {first, first + size_bytes}});
  return first;
}

void add_program_twin(const std::type_info& program, Twin twin) {
  const Machine::Lock lock(machine().mutex);
  twins().by_kernel.clear();
  twins().by_program.insert_or_assign(demangled(program.name()), std::move(twin));
}

void run_programs(Programs how) {
  const Machine::Lock lock(machine().mutex);
  twins().how = how;
}

bool programs_are_compared() noexcept { return twins().how == Programs::kCompared; }

const Twin* program_twin(const std::string& kernel) {
  Twins& its = twins();
  if (its.how == Programs::kPtx) return nullptr;
  const auto [entry, is_new] = its.by_kernel.try_emplace(kernel, nullptr);
  if (is_new) {
    const auto found = its.by_program.find(program_of(kernel));
    if (found != its.by_program.end()) entry->second = &found->second;
  }
  return entry->second;
}

std::uint64_t run_compared(Machine& machine, DeviceState& device, const Twin& twin,
                           const ptx::Kernel& kernel, const ptx::Launch& launch,
                           std::vector<Access>& accesses) {
  ptx::GlobalMemory by_twin(machine, device);
  const TwinLaunch its(kernel, launch, by_twin);
  twin(its);
  std::vector<std::vector<std::byte>> made;
  for (const TwinLaunch::Written& written : its.written())
    made.emplace_back(written.bytes, written.bytes + written.before.size());
  // The last first: where two overlap, each has the bytes of before the twin.
  for (auto written = its.written().rbegin(); written != its.written().rend(); ++written)
    std::copy(written->before.begin(), written->before.end(), written->bytes);

  ptx::GlobalMemory by_ptx(machine, device);
  const std::uint64_t executed = ptx::run(kernel, launch, by_ptx);
  const std::size_t first = accesses.size();
  by_ptx.append_accesses(accesses);
  std::vector<Access> told;
  by_twin.append_accesses(told);
  for (std::size_t n = 0; n < made.size(); ++n) {
    if (same_but_for_nans(made[n], its.written()[n].bytes)) continue;
    machine.find(fmt::format("the twin of {} leaves other bytes than its PTX", kernel.name));
  }
  for (std::size_t n = first; n < accesses.size(); ++n) {
    const Allocation* const allocation = device.memory.find(accesses[n].range.begin);
    const bool of_module = allocation != nullptr && allocation->of_module;  // a constant table
    if (of_module || covers(told, accesses[n])) continue;
    machine.find(fmt::format("the twin of {} does not tell of {} bytes that its PTX {}",
                             kernel.name, accesses[n].range.size_bytes(),
                             accesses[n].writes ? "writes" : "reads"));
  }
  return executed;
}

}  // namespace ziggurat::cuda_double
