// SPDX-License-Identifier: Apache-2.0
// aio/probe.cc: an engine works if 4 KiB written through it can be read back, or if it reports that
// the disk is full (a run whose store is whole must go on when the disk is full). In a directory
// where nothing may be written, an engine works if it answers a read, even by an error of a damaged
// medium.
//
// Each candidate is tried on a reactor of its own: a ring belongs to the thread that submits first,
// and that must be the thread of the real reactor.
#include "aio/probe.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <utility>

#include "aio/direct_file.h"
#include "aio/posix_files.h"
#include "aio/thread_engine.h"
#ifdef ZIGGURAT_HAVE_LIBAIO
#include "aio/libaio_engine.h"
#endif
#ifdef ZIGGURAT_HAVE_URING
#include "aio/uring_engine.h"
#endif
#include "base/bytes.h"
#include "base/error.h"
#include "base/log.h"

namespace ziggurat {
namespace {

constexpr std::size_t kProbeBytes = 4096;

using Make = MakeIoEngine;

struct Candidate {
  const char* name;
  const char* library;
  Make make;  // empty if this build does not have the engine
};

std::vector<Candidate> candidates() {
  std::vector<Candidate> all;
#ifdef ZIGGURAT_HAVE_URING
  all.push_back({"io_uring", "liburing", [](Reactor& reactor) -> std::unique_ptr<IoEngine> {
                   return UringEngine::create(reactor);
                 }});
#else
  all.push_back({"io_uring", "liburing", {}});
#endif
#ifdef ZIGGURAT_HAVE_LIBAIO
  all.push_back({"libaio", "libaio", [](Reactor& reactor) -> std::unique_ptr<IoEngine> {
                   return LibaioEngine::create(reactor);
                 }});
#else
  all.push_back({"libaio", "libaio", {}});
#endif
  all.push_back({"threads", "", [](Reactor& reactor) -> std::unique_ptr<IoEngine> {
                   return std::make_unique<ThreadEngine>(reactor);
                 }});
  return all;
}

std::string uring_hint(int error_number) {
  if (error_number == ENOSYS) return "; this kernel has no io_uring, or a seccomp filter hides it";
  if (error_number == ENOMEM) return "; raise RLIMIT_MEMLOCK (ulimit -l)";
  if (error_number != EPERM && error_number != EACCES) return "";
  int disabled = -1;
  std::ifstream("/proc/sys/kernel/io_uring_disabled") >> disabled;
  if (disabled == 2)
    return "; kernel.io_uring_disabled=2 forbids io_uring to all users (sysctl "
           "kernel.io_uring_disabled=0 allows it)";
  const std::string sysctl = disabled < 0 ? "this kernel has no kernel.io_uring_disabled"
                                          : fmt::format("kernel.io_uring_disabled={}", disabled);
  return fmt::format(
      "; {}{}", sysctl,
      disabled == 1
          ? " forbids it to users outside kernel.io_uring_group, or a seccomp filter does"
          : ", so a seccomp filter forbids it (container runtimes do by default; a profile that "
            "adds io_uring_setup, io_uring_enter and io_uring_register allows it)");
}

std::string hint(const Error& error) {
  const auto begins = [&](const char* text) {
    return std::strncmp(error.what(), text, std::strlen(text)) == 0;
  };
  if (begins("io_uring")) return uring_hint(error.native());
  if (begins("libaio: io_setup") && error.native() == EAGAIN) {
    return "; other processes hold all of fs.aio-max-nr requests (sysctl fs.aio-max-nr raises it)";
  }
  return {};
}

struct FreeDeleter {
  void operator()(std::byte* memory) const noexcept { std::free(memory); }
};

Task<> write_and_read_back(DirectFile& file) {
  const std::size_t grain = std::max(file.alignment().offset_bytes, file.alignment().memory_bytes);
  const std::size_t size = round_up(kProbeBytes, grain);
  const std::unique_ptr<std::byte, FreeDeleter> memory(
      static_cast<std::byte*>(std::aligned_alloc(grain, round_up(2 * size, grain))));
  if (memory == nullptr) throw system_error(ENOMEM, "cannot allocate memory to try an I/O engine");
  const std::span<std::byte> out(memory.get(), size);
  const std::span<std::byte> in(memory.get() + size, size);
  for (std::size_t i = 0; i < size; ++i) out[i] = static_cast<std::byte>(i * 37 + i / 256 + 1);
  std::fill(in.begin(), in.end(), std::byte{0});
  co_await file.write(0, out);
  co_await file.read(0, in);
  if (!std::equal(out.begin(), out.end(), in.begin())) {
    throw Error(ErrorCode::kDataLoss,
                fmt::format("{} bytes were written, but other bytes were read back", size));
  }
}

/// Opens an unnamed file in the directory. Null if no file may be made there.
std::unique_ptr<DirectFile> unnamed_file(Reactor& reactor, IoEngine& engine,
                                         const std::string& directory) {
  try {
    return DirectFile::open(reactor, engine, directory, {.writable = true, .unnamed = true});
  } catch (const Error& error) {
    const int why = error.native();
    if (why != EROFS && why != EACCES && why != EPERM) throw;
    return nullptr;
  }
}

/// Returns the size of a regular file that this process may read; 0 if `path` is no such file.
std::uint64_t readable_bytes(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode)) return 0;
  return static_cast<std::uint64_t>(status.st_size);
}

/// Returns the largest file in a directory, or else in one of the directories in it (as in a folder
/// of checkpoints). Empty if there is no file to read.
std::string file_to_read(const std::string& directory, int levels = 1) {
  std::string largest;
  std::uint64_t bytes = 0;
  std::vector<std::string> below;
  std::error_code failure;
  std::filesystem::directory_iterator entry(directory, failure);
  for (; !failure && entry != std::filesystem::directory_iterator(); entry.increment(failure)) {
    std::error_code not_known;
    if (entry->is_directory(not_known)) below.push_back(entry->path().string());
    const std::uint64_t its = readable_bytes(entry->path().string());
    if (its > bytes) largest = entry->path().string();
    bytes = std::max(bytes, its);
  }
  for (std::size_t i = 0; i < below.size() && largest.empty() && levels > 0; ++i)
    largest = file_to_read(below[i], levels - 1);
  return largest;
}

Task<> read_first_block(DirectFile& file, std::uint64_t size_bytes) {
  const std::size_t grain = std::max(file.alignment().offset_bytes, file.alignment().memory_bytes);
  const std::unique_ptr<std::byte, FreeDeleter> memory(
      static_cast<std::byte*>(std::aligned_alloc(grain, round_up(size_bytes, grain))));
  if (memory == nullptr) throw system_error(ENOMEM, "cannot allocate memory to try an I/O engine");
  co_await file.read(0, {memory.get(), size_bytes});
}

void try_to_read(Reactor& reactor, IoEngine& engine, const std::string& path) {
  auto file = DirectFile::open(reactor, engine, path, {});
  const std::size_t grain =
      std::max(file->alignment().offset_bytes, file->alignment().memory_bytes);
  const std::uint64_t block = round_up(kProbeBytes, grain);
  const std::uint64_t size = file->size_bytes();
  if (size < block) file = DirectFile::open(reactor, engine, path, {.direct = false});
  try {
    reactor.block_on(read_first_block(*file, std::min(size, block)));
  } catch (const Error& error) {
    // The engine has done its work; the reader of the file handles what is damaged in it.
    const int why = error.native();
    const bool of_the_file = why == EIO || why == ENODATA || why == EILSEQ || why == ESTALE ||
                             error.code() == ErrorCode::kDataLoss;
    if (!of_the_file) throw;
  }
}

void try_out(const Make& make, const std::string& directory) {
  Reactor reactor;
  const auto engine = make(reactor);
  if (const auto file = unnamed_file(reactor, *engine, directory)) {
    reactor.block_on(write_and_read_back(*file));
  } else if (const std::string there = file_to_read(directory); !there.empty()) {
    try_to_read(reactor, *engine, there);
  }
}

/// Returns why `candidate` does not work here; empty if it does.
std::string reason_against(const Candidate& candidate, const std::string& directory) {
  if (!candidate.make) {
    return fmt::format(
        "this build does not include this engine ({} was not found when it was built)",
        candidate.library);
  }
  try {
    try_out(candidate.make, directory);
    return {};
  } catch (const Error& error) {
    if (error.native() == ENOSPC || error.native() == EDQUOT) return {};
    return error.what() + hint(error);
  }
}

}  // namespace

std::unique_ptr<IoEngine> choose_io_engine(Reactor& reactor, const std::string& directory,
                                           IoProbe* probe) {
  return chosen_io_engine(directory, probe)(reactor);
}

MakeIoEngine chosen_io_engine(const std::string& directory, IoProbe* probe) {
  const char* const variable = std::getenv("ZIGGURAT_IO");
  const std::string forced = variable != nullptr ? variable : "";
  const std::vector<Candidate> all = candidates();
  const bool known = std::any_of(all.begin(), all.end(),
                                 [&](const Candidate& each) { return each.name == forced; });
  if (!forced.empty() && !known) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("ZIGGURAT_IO={} is not an I/O engine: use io_uring, libaio or threads",
                            forced));
  }

  IoProbe report;
  for (const Candidate& candidate : all) {
    if (!forced.empty() && candidate.name != forced) {
      report.notes.push_back(fmt::format("{}: not tried, ZIGGURAT_IO={}", candidate.name, forced));
      continue;
    }
    const std::string reason = reason_against(candidate, directory);
    if (!reason.empty()) {
      report.notes.push_back(fmt::format("{}: {}", candidate.name, reason));
      continue;
    }
    if (forced.empty() && !report.notes.empty()) {
      note_degraded("io engine", fmt::format("using {}, since {}", candidate.name,
                                             fmt::join(report.notes, "; ")));
    }
    report.engine = candidate.name;
    if (probe != nullptr) *probe = std::move(report);
    return candidate.make;
  }
  throw Error(ErrorCode::kUnavailable, fmt::format("no I/O engine works in {}: {}", directory,
                                                   fmt::join(report.notes, "; ")));
}

}  // namespace ziggurat
