// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/cuda_double.h: a strict double of the CUDA runtime, as tests control it.
//
// It takes the place of libcudart_static.a at link time (tests/cuda_double/README.md). Time is
// virtual: each operation gets a seeded duration when it is submitted, and the clock moves only as
// far as a thread waits, so that a result that was not waited for is not there. What the
// documentation forbids becomes a finding; a process that ends with findings nobody took ends with
// status 1. Thread-safe, except reset(), which no call of CUDA may accompany.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace ziggurat::cuda_double {

/// Who moves the virtual clock.
enum class Pace {
  kWhenWaitedFor,  ///< threads that wait, each query by one operation, and pending host functions
  /// As kWhenWaitedFor, but only while all other threads of the process sleep (quiet.h): where
  /// what they do depends on nothing else that takes real time, the trace is the same each time.
  kWhenQuiet,
  kByHand,  ///< advance_to() alone
};

/// What the runtime does wrong, for tests of those that are to see it.
enum class Mischief {
  kNone,
  kNoWaits,     ///< cudaStreamWaitEvent lets no stream wait
  kStaleSource  ///< a copy to the device takes the source of the copy of that size before it
};

struct Options {
  int devices = 1;                         ///< 0: a machine with a driver and no GPU
  int first_gpu = 0;                       ///< how the machine numbers device 0: its bus tells
  std::uint64_t memory_bytes = 512 << 20;  ///< each device
  int driver_version = CUDART_VERSION;     ///< the newest CUDA that the driver knows
  /// What cudaHostRegister and cudaHostAlloc give in all.
  std::uint64_t pinned_bytes_max = std::numeric_limits<std::uint64_t>::max();
  Pace pace = Pace::kWhenWaitedFor;
  /// With kWhenQuiet: the number (gettid) of the one thread that has to sleep, which itself need
  /// not wait for it; 0: all others. Much cheaper, and the trace may differ.
  int computing_thread = 0;
  bool has_sections = false;  ///< whether begin_section() may be called
  Mischief mischief = Mischief::kNone;
  /// The clock waits this long, in real time, for a host function that runs; then it goes on, and
  /// the trace depends on real time.
  std::chrono::milliseconds host_function_patience{200};
  /// A thread that waits for this long, in real time, ends the process with a list of what waits.
  std::chrono::milliseconds hang_after{60000};
};

/// A fresh machine: no allocation, stream, error, finding or injected fault. Handles and addresses
/// of before are void. A process that never calls it sees cudaErrorInsufficientDriver.
void reset(std::uint64_t seed, const Options& options = {});

/// The `n`-th call from now (1: the next), of those that can fail, returns `error` and does
/// nothing. Errors that the documentation calls fatal to the process stay (is_sticky).
void fail_call(std::uint64_t n, cudaError_t error);
/// The `n`-th operation that completes from now fails with `error`; its effect is lost.
void fail_completion(std::uint64_t n, cudaError_t error);
/// Every device fails now with a sticky error. What is under way never completes, but copies to
/// pinned memory go on writing there, with each later call: such memory is not to be used again.
void lose_device(cudaError_t error = cudaErrorLaunchFailure);
/// What the injected error struck: "cudaEventRecord", "cudaMemcpyAsync of 64 bytes to the host".
/// Empty: nothing so far.
std::string struck();
/// "This leaves the process in an inconsistent state and any further CUDA work will return the same
/// error" (driver_types.h:769-935), and uncorrectable ECC errors (:628).
bool is_sticky(cudaError_t error) noexcept;

/// How many there were since reset(): what n a campaign may name.
std::uint64_t calls();
std::uint64_t completions();

/// What was done against the documentation, and takes it: the next call has what came since.
[[nodiscard]] std::vector<std::string> take_findings();
/// take_findings(), and what is still allocated, registered, created or under way.
[[nodiscard]] std::vector<std::string> report();

/// How many devices have a context, which takes memory of them.
int contexts();

/// A hash of all operations so far in the order in which they completed. Equal seeds and equal
/// calls from one thread give equal traces.
std::uint64_t trace_hash();

/// Virtual time since reset(), and when the next operation completes, if one can.
std::chrono::nanoseconds now();
std::optional<std::chrono::nanoseconds> next_completion();
/// Completes all operations that end until `time`, in order.
void advance_to(std::chrono::nanoseconds time);

/// Tells of accesses of the CPU to host memory, to be ordered with copies. All threads of the host
/// count as one. No access to pinned memory need be told: a wrong one is often seen anyway, by the
/// poison in destinations and the comparison of sources.
void host_reads(const void* address, std::size_t size_bytes);

/// Where the CPU may look at `address` of a device, behind the device's back.
/// Nothing waits. Errors: kInvalidArgument if no allocation holds these bytes.
std::byte* device_bytes(const void* address, std::size_t size_bytes);

/// Memory of a device that a section uses.
struct SectionMemory {
  const void* address = nullptr;
  std::size_t size_bytes = 0;
  bool writes = false;
};
/// In the place of a kernel the CPU computes with a device's memory, as one operation of a stream.
/// Time goes on until the stream has come to it, and no further; then section_view() of that memory
/// is accessible, until end_section(): its pages, which may have neighbours. An access at any other
/// time faults. A stream has one section at a time.
cudaError_t begin_section(cudaStream_t stream, std::span<const SectionMemory> memory);
/// Errors: kInvalidArgument if the stream is in no section.
void end_section(cudaStream_t stream);
/// Where sections find `address`, always the same. Errors: as device_bytes().
std::byte* section_view(const void* address, std::size_t size_bytes);

/// As between cudaStreamBeginCapture and EndCapture: operations and waits are refused.
void set_capturing(cudaStream_t stream, bool capturing);

}  // namespace ziggurat::cuda_double
