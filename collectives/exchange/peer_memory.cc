// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/peer_memory.cc: calls process_vm_readv, and finds out whether this machine
// allows it.
#include "collectives/exchange/peer_memory.h"

#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <fstream>

#include "base/error.h"
#include "collectives/random.h"

namespace ziggurat {
namespace {

constexpr const char* kYama = "/proc/sys/kernel/yama/ptrace_scope";

}  // namespace

std::string this_host() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 64> network{};
  const ssize_t length = ::readlink("/proc/self/ns/net", network.data(), network.size() - 1);
  if (boot.empty() || length <= 0) {
    throw Error(ErrorCode::kUnavailable,
                "/proc/sys/kernel/random/boot_id or /proc/self/ns/net cannot be read: it is not "
                "known which ranks share a host; mount /proc");
  }
  return boot + " " + network.data();
}

MemoryProbe own_memory_probe() {
  static const std::uint64_t value = random_number();
  return {::getpid(), reinterpret_cast<std::uint64_t>(&value), value};
}

std::shared_ptr<const void> Permission::take() {
  const std::lock_guard lock(mutex_);
  if (holders_ == 0) set_(true);
  ++holders_;
  return {this, [this](const void*) {
            const std::lock_guard again(mutex_);
            if (--holders_ == 0) set_(false);
          }};
}

std::shared_ptr<const void> allow_reading() {
  static Permission of_this_process([](bool allowed) {
    int scope = 0;  // stays 0 without Yama, which also means that reading is allowed
    std::ifstream(kYama) >> scope;
    if (scope != 1) return;
    const unsigned long whom = allowed ? PR_SET_PTRACER_ANY : 0;
    if (::prctl(PR_SET_PTRACER, whom, 0, 0, 0) != 0 && allowed)
      throw system_error(
          errno, "cannot let ranks of this host read each other's memory: prctl(PR_SET_PTRACER)");
  });
  return of_this_process.take();
}

std::string why_not_readable(const MemoryProbe& probe) {
  if (probe.process == 0) return "it offers none";
  std::uint64_t found = 0;
  try {
    read_memory(probe.process, probe.address, std::as_writable_bytes(std::span(&found, 1)));
  } catch (const Error& error) {
    return error.what();
  }
  return found == probe.value ? ""
                              : "its process number belongs to another process on this rank's "
                                "side: the ranks are in "
                                "different PID namespaces";
}

void read_memory(std::int64_t process, std::uint64_t address, std::span<std::byte> into) {
  std::size_t done = 0;
  while (done < into.size()) {
    const iovec local{into.data() + done, into.size() - done};
    const iovec remote{reinterpret_cast<void*>(address + done), into.size() - done};
    const ssize_t read = ::process_vm_readv(static_cast<pid_t>(process), &local, 1, &remote, 1, 0);
    if (read > 0) {
      done += static_cast<std::size_t>(read);
      continue;
    }
    const int error = read == 0 ? EIO : errno;
    if (error == EINTR) continue;
    if (error == ESRCH)
      throw Error(ErrorCode::kUnavailable, "is gone: its process has ended", error);
    throw system_error(error, fmt::format("process {} cannot be read", process));
  }
}

}  // namespace ziggurat
