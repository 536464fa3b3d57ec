// SPDX-License-Identifier: Apache-2.0
// tests/collectives/nccl/double/nccl_double.cc: libnccl.so.2 as its documentation describes it,
// among processes of one machine.
//
// Beside each rule stands where it is written: "h:N" is line N of nccl.h 2.32.3, the rest are pages
// of docs.nvidia.com/deeplearning/nccl/user-guide/docs. All communicators are non-blocking. Sums
// are taken from the last rank to the first: NCCL promises no order, and a test must see the
// difference. An operation holds its GPU until it ends, as kernels do that fill it.
#include <dlfcn.h>
#include <nccl.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/numerics/float16.h"
#include "base/numerics/rounding.h"
#include "tests/collectives/nccl/double/board.h"
#include "tests/collectives/nccl/double/cuda_hooks.h"
#include "tests/collectives/nccl/double/nccl_double.h"

namespace ziggurat::nccl_double {
namespace {

enum class Phase { kJoining, kJoined, kFinalizing, kFinalized };
enum class Fault { kNone, kError, kAsync, kHang, kDie, kLate };

struct Communicator {
  Board* board = nullptr;
  int rank = 0;
  int world = 1;
  int device = 0;
  Phase phase = Phase::kJoining;
  bool counted = false;  // on the board, in this phase
  int unsettled = 0;     // answers of ncclInProgress still to give
  std::uint64_t sequence = 0;
  std::vector<std::function<void()>> to_launch;
  std::atomic<int> error{ncclSuccess};
  std::atomic<bool> aborted{false};
  std::atomic<int> under_way{0};
};
using Held = std::shared_ptr<Communicator>;

/// An operation on a stream.
struct Work {
  Held communicator;
  std::vector<Transfer> transfers;
  std::function<void()> then = [] {};
  Fault fault = Fault::kNone;
};

struct State {
  std::mutex mutex;
  std::map<ncclComm_t, Held> living;
  std::map<int, std::thread::id> thread_of_device;
  std::map<int, std::unique_ptr<std::atomic<bool>>> busy;  // by device: an operation runs
  std::map<std::string, int> calls;
  Report report;
};
State& state() {
  static State& it = *new State;  // streams may end after main()
  return it;
}

struct Group {
  int depth = 0;
  ncclResult_t result = ncclSuccess;
  std::map<ncclComm_t, Work> works;
  cudaStream_t stream = nullptr;
};
thread_local Group group;

[[noreturn]] void broken(const std::string& rule) {
  std::fprintf(stderr, "NCCL double: %s\n", rule.c_str());
  std::fflush(stderr);
  ::_exit(86);
}

const CudaHooks& cuda() {
  static const CudaHooks& hooks = [&]() -> const CudaHooks& {
    void* const found = ::dlsym(RTLD_DEFAULT, kCudaHooksSymbol);
    if (found == nullptr) broken("the program has no double of CUDA");
    return *reinterpret_cast<GetCudaHooks>(found)();
  }();
  return hooks;
}

/// What the environment wants of this call of `function`.
Fault counted(const char* function) {
  const std::lock_guard lock(state().mutex);
  const int nth = ++state().calls[function];
  const char* const text = std::getenv("ZIGGURAT_NCCL_DOUBLE_FAULT");
  if (text == nullptr) return Fault::kNone;
  const std::string here = std::string(function) + ":" + std::to_string(nth) + ":";
  const std::string fault = text;
  if (fault.compare(0, here.size(), here) != 0) return Fault::kNone;
  const std::string what = fault.substr(here.size());
  if (what == "die") ::raise(SIGKILL);
  if (what == "error") return Fault::kError;
  if (what == "async") return Fault::kAsync;
  return what == "late" ? Fault::kLate : Fault::kHang;
}

/// usage/threadsafety: "it is not safe to issue NCCL operations in parallel to independent
/// communicators located on the same device with multiple threads". A test cannot wait for two
/// threads to meet, so a device belongs to the first one while it has communicators.
void require_thread(int device, const char* function) {
  const std::lock_guard lock(state().mutex);
  auto& owner = state().thread_of_device[device];
  if (owner == std::thread::id()) owner = std::this_thread::get_id();
  if (owner != std::this_thread::get_id()) {
    broken(std::string(function) + ": two threads call communicators of one device");
  }
}

Held find(ncclComm_t handle, const char* function) {
  const std::lock_guard lock(state().mutex);
  const auto found = state().living.find(handle);
  // h:312, h:316: both free the object.
  if (found == state().living.end()) {
    broken(std::string(function) + " on a communicator that was destroyed, aborted or never made");
  }
  return found->second;
}

void forget(ncclComm_t handle) {
  const std::lock_guard lock(state().mutex);
  const int device = state().living.at(handle)->device;
  state().living.erase(handle);
  for (const auto& [other, its] : state().living) {
    if (its->device == device) return;
  }
  state().thread_of_device.erase(device);
}

std::atomic<bool>& busy(int device) {
  const std::lock_guard lock(state().mutex);
  auto& flag = state().busy[device];
  if (!flag) flag = std::make_unique<std::atomic<bool>>(false);
  return *flag;
}

void nap() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

/// One look at every message; those of one pair and direction go one after the other.
bool progress(Work& work) {
  Communicator& its = *work.communicator;
  std::array<std::array<bool, kRanksMax>, 2> blocked{};
  bool all = true;
  for (Transfer& transfer : work.transfers) {
    bool& stuck = blocked[transfer.sends ? 1 : 0][static_cast<std::size_t>(transfer.peer)];
    if (transfer.ended() || stuck) continue;
    const auto self = static_cast<std::size_t>(its.rank);
    const auto peer = static_cast<std::size_t>(transfer.peer);
    transfer.move(transfer.sends ? its.board->pipes[self][peer] : its.board->pipes[peer][self]);
    if (work.fault == Fault::kLate && transfer.sends && transfer.done * 2 > transfer.size) {
      ::raise(SIGKILL);
    }
    stuck = !transfer.ended();
    all = all && !stuck;
  }
  for (const Transfer& transfer : work.transfers) all = all && transfer.ended();
  return all;
}

/// The kernel of an operation. It spins until its peers have come, or the communicator is aborted
/// (h:316, "aborts any operations that might still be running on the device").
void run(Work& work) {
  Communicator& its = *work.communicator;
  std::atomic<bool>& device = busy(its.device);
  bool free = false;
  while (!its.aborted && !device.compare_exchange_strong(free, true)) {
    free = false;
    nap();
  }
  if (!its.aborted) {
    try {
      while (!its.aborted && (work.fault == Fault::kAsync || work.fault == Fault::kHang ||
                              its.error != ncclSuccess || !progress(work))) {
        if (work.fault == Fault::kAsync) its.error = ncclRemoteError;
        nap();
      }
      if (!its.aborted) work.then();
    } catch (const std::string& rule) {
      broken(rule);
    }
    device = false;
  }
  --its.under_way;
}

void launch(Work work, cudaStream_t stream) {
  ++work.communicator->under_way;
  auto* const owned = new Work(std::move(work));
  const cudaError_t error = cuda().launch(
      stream,
      [](void* data) {
        const std::unique_ptr<Work> held(static_cast<Work*>(data));
        run(*held);
      },
      owned);
  if (error != cudaSuccess) broken("the stream of an operation takes no work");
}

/// usage/groups, "Nonblocking Group Operation": what returned ncclInProgress is not on its stream
/// before ncclCommGetAsyncError has answered ncclSuccess.
ncclResult_t begin(Work work, cudaStream_t stream) {
  Communicator& its = *work.communicator;
  its.unsettled = 2;
  its.to_launch.push_back([work = std::move(work), stream] { launch(work, stream); });
  return ncclInProgress;
}

/// usage/communicators, "Creating a communicator with options": an operation on a communicator
/// whose state is ncclInProgress is an error of the user.
void require_settled(const Communicator& its, const char* function) {
  if (its.phase != Phase::kJoined || its.unsettled > 0) {
    broken(std::string(function) +
           " before ncclCommGetAsyncError answered ncclSuccess for what came before it");
  }
}

std::byte* memory(const Communicator& its, const void* address, std::size_t size,
                  const char* function) {
  if (size == 0) return nullptr;
  // usage/data: "Each of the pointers ... accessible by the CUDA device of the communicator".
  cudaPointerAttributes attributes{};
  std::byte* const bytes = cuda().device_bytes(address, size);
  if (bytes == nullptr || cuda().pointer_attributes(&attributes, address) != cudaSuccess ||
      attributes.device != its.device) {
    broken(std::string(function) + " on memory that is not the device's, or reaches beyond it");
  }
  return bytes;
}

std::size_t size_of(ncclDataType_t type, const char* function) {
  switch (type) {
    case ncclUint8: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclFloat32: return 4;
    default: broken(std::string(function) + " of a type that the double does not know");
  }
}

/// What all operations have in common. Null: it fails with `*result`.
struct Operation {
  Held its;
  Fault fault = Fault::kNone;
};
Operation operation(const char* function, ncclComm_t handle, cudaStream_t stream) {
  Operation made;
  made.fault = counted(function);
  made.its = find(handle, function);
  require_thread(made.its->device, function);
  require_settled(*made.its, function);
  int current = -1;
  static_cast<void>(cuda().get_device(&current));
  // usage/streams, and every kernel launch: the stream is one of the communicator's device.
  if (cuda().device_of_stream(stream) != made.its->device) {
    broken(std::string(function) + " on a stream of another device, or on none");
  }
  if (current != made.its->device) {
    broken(std::string(function) + " on a thread whose device is another one");
  }
  ++state().report.operations;
  return made;
}

ncclResult_t submit(Operation& made, Work work, cudaStream_t stream, ncclComm_t handle) {
  if (made.fault == Fault::kError) {
    if (group.depth > 0) group.result = ncclInternalError;
    return ncclInternalError;
  }
  work.communicator = made.its;
  work.fault = made.fault;
  if (group.depth == 0) return begin(std::move(work), stream);
  // h:851-859: enqueued until ncclGroupEnd, as one operation.
  Work& all = group.works[handle];
  all.communicator = made.its;
  if (work.fault != Fault::kNone) all.fault = work.fault;
  all.transfers.insert(all.transfers.end(), work.transfers.begin(), work.transfers.end());
  group.stream = stream;
  return ncclSuccess;
}

enum Call : std::uint64_t { kAllGather, kReduceScatter, kAllReduce, kSendRecv };

/// All send `sent(r)` to rank r, and receive into rows.
Work exchange(const Communicator& its, const Header& header,
              const std::function<std::pair<std::byte*, std::size_t>(int)>& sent,
              const std::function<std::pair<std::byte*, std::size_t>(int)>& received) {
  Work work;
  for (int r = 0; r < its.world; ++r) {
    const auto [from, length] = sent(r);
    if (from != nullptr) work.transfers.push_back({true, r, header, from, length});
    const auto [to, room] = received(r);
    if (to != nullptr) work.transfers.push_back({false, r, header, to, room});
  }
  return work;
}

float value(const std::byte* at, ncclDataType_t type, std::size_t i) {
  if (type == ncclFloat32) {
    float wide = 0;
    std::memcpy(&wide, at + i * sizeof(float), sizeof(float));
    return wide;
  }
  std::uint16_t half = 0;
  std::memcpy(&half, at + i * sizeof(half), sizeof(half));
  return type == ncclBfloat16 ? bf16_to_float(half) : fp16_to_float(half);
}

/// Rounded at each rank, as a ring does.
void put_sum(const std::vector<std::vector<std::byte>>& rows, ncclDataType_t type,
             std::size_t count, std::byte* to) {
  std::vector<std::byte> sum = rows.back();
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t r = rows.size() - 1; r-- > 0;) {
      const float total = value(sum.data(), type, i) + value(rows[r].data(), type, i);
      if (type == ncclFloat32) {
        std::memcpy(sum.data() + i * sizeof(total), &total, sizeof(total));
        continue;
      }
      const std::uint16_t half = type == ncclBfloat16 ? float_to_bf16(total) : float_to_fp16(total);
      std::memcpy(sum.data() + i * sizeof(half), &half, sizeof(half));
    }
  }
  std::memcpy(to, sum.data(), sum.size());
}

/// Rows of `length` bytes, one from each rank, and their sum into `to`.
Work sum(const Communicator& its, const Header& header, ncclDataType_t type, std::size_t length,
         const std::function<std::byte*(int)>& sent, std::byte* to) {
  const auto rows = std::make_shared<std::vector<std::vector<std::byte>>>(
      static_cast<std::size_t>(its.world), std::vector<std::byte>(length));
  Work work = exchange(
      its, header, [&](int r) { return std::pair(sent(r), length); },
      [&](int r) { return std::pair((*rows)[static_cast<std::size_t>(r)].data(), length); });
  work.then = [rows, type, to, count = header.count] { put_sum(*rows, type, count, to); };
  ++state().report.sums;
  return work;
}

/// usage/communicators: "Using the same CUDA device multiple times as different ranks of the same
/// NCCL communicator is not supported and may lead to hangs"; NCCL finds what it can.
bool duplicate_gpu(const Communicator& its) {
  for (int a = 0; a < its.world; ++a) {
    for (int b = 0; b < a; ++b) {
      if (std::strcmp(its.board->gpus[static_cast<std::size_t>(a)].data(),
                      its.board->gpus[static_cast<std::size_t>(b)].data()) == 0) {
        return true;
      }
    }
  }
  return false;
}

/// What is asked again and again moves on.
void advance(Communicator& its) {
  const auto world = static_cast<std::uint32_t>(its.world);
  if (its.phase == Phase::kJoining) {
    // Joining allocates, and allocation waits for the device (CUDA programming guide, implicit
    // synchronisation): a kernel that waits for another rank holds it up.
    if (!its.counted && !busy(its.device)) {
      its.counted = true;
      ++its.board->joined;
    }
    if (its.board->joined == world) {
      its.phase = Phase::kJoined;
      its.counted = false;
      if (duplicate_gpu(its)) its.error = ncclInvalidUsage;
    }
  } else if (its.phase == Phase::kFinalizing) {
    // h:304-308: "flushes all issued communications", then "globally quiescent".
    if (!its.counted && its.under_way == 0) {
      its.counted = true;
      ++its.board->finalizing;
    }
    if (its.board->finalizing == world) its.phase = Phase::kFinalized;
  } else if (its.unsettled > 0 && --its.unsettled == 1) {
    for (const auto& work : its.to_launch) work();
    its.to_launch.clear();
  }
}

/// ncclSend and ncclRecv.
ncclResult_t transfer(const char* function, bool sends, const void* address, std::size_t count,
                      ncclDataType_t type, int peer, ncclComm_t handle, cudaStream_t stream) {
  Operation made = operation(function, handle, stream);
  // h:735-737: alone it blocks the GPU until the other side runs.
  if (group.depth == 0) broken(std::string(function) + " outside a group");
  const std::size_t length = count * size_of(type, function);
  Work work;
  work.transfers.push_back({sends,
                            peer,
                            {kSendRecv, 0, count, type},
                            memory(*made.its, address, length, function),
                            length});
  return submit(made, std::move(work), stream, handle);
}

}  // namespace
}  // namespace ziggurat::nccl_double

using namespace ziggurat::nccl_double;  // NOLINT: the functions below are C's

#define NCCL_DOUBLE_API __attribute__((visibility("default")))

extern "C" {

NCCL_DOUBLE_API void ziggurat_nccl_double_report(Report* report) {
  const std::lock_guard lock(state().mutex);
  *report = state().report;
  report->living = state().living.size();
}

NCCL_DOUBLE_API ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
NCCL_DOUBLE_API const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclInternalError: return "internal error";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    default: return "an error of the double";
  }
}

NCCL_DOUBLE_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (counted("ncclGetUniqueId") == Fault::kError) return ncclInternalError;
  const std::string place = Board::create();
  if (place.empty() || place.size() >= sizeof(id->internal)) return ncclSystemError;
  std::memset(id, 0, sizeof(*id));
  std::memcpy(id->internal, place.data(), place.size());
  return ncclSuccess;
}

NCCL_DOUBLE_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* handle, int world, ncclUniqueId id,
                                                    int rank, ncclConfig_t* config) {
  const Fault fault = counted("ncclCommInitRankConfig");
  // h:135-136.
  if (config == nullptr || config->magic != NCCL_API_MAGIC) broken("a config without initializer");
  if (config->blocking != 0) broken("a blocking communicator, which cannot be told to stop");
  if (rank < 0 || rank >= world || world > kRanksMax) return ncclInvalidArgument;
  const auto made = std::make_shared<Communicator>();
  made->rank = rank;
  made->world = world;
  static_cast<void>(cuda().get_device(&made->device));  // h:288-289
  require_thread(made->device, "ncclCommInitRankConfig");
  made->board = Board::open(id.internal);
  if (fault == Fault::kError || made->board == nullptr) return ncclSystemError;
  auto& gpu = made->board->gpus[static_cast<std::size_t>(rank)];
  static_cast<void>(cuda().pci_bus_id(gpu.data(), static_cast<int>(gpu.size()), made->device));
  if (fault == Fault::kAsync) made->error = ncclRemoteError;
  if (fault == Fault::kHang) made->counted = true;
  const std::lock_guard lock(state().mutex);
  *handle = reinterpret_cast<ncclComm_t>(made.get());
  state().living[*handle] = made;
  ++state().report.joined;
  return ncclInProgress;
}

NCCL_DOUBLE_API ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* result) {
  const Fault fault = counted("ncclCommGetAsyncError");
  Communicator& its = *find(handle, "ncclCommGetAsyncError");
  if (fault == Fault::kError || fault == Fault::kAsync) its.error = ncclRemoteError;
  if (its.error == ncclSuccess) advance(its);
  *result = static_cast<ncclResult_t>(its.error.load());  // it stays
  const bool settled =
      its.unsettled == 0 && (its.phase == Phase::kJoined || its.phase == Phase::kFinalized);
  if (*result == ncclSuccess && !settled) *result = ncclInProgress;
  return ncclSuccess;
}

NCCL_DOUBLE_API ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  const Fault fault = counted("ncclCommFinalize");
  Communicator& its = *find(handle, "ncclCommFinalize");
  require_thread(its.device, "ncclCommFinalize");
  require_settled(its, "ncclCommFinalize");
  if (fault == Fault::kError) return ncclInternalError;
  if (fault == Fault::kHang) its.counted = true;
  its.phase = Phase::kFinalizing;
  return ncclInProgress;
}

NCCL_DOUBLE_API ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  if (counted("ncclCommDestroy") == Fault::kError) return ncclInternalError;
  Communicator& its = *find(handle, "ncclCommDestroy");
  require_thread(its.device, "ncclCommDestroy");
  // h:304-308: destroy comes when the state after ncclCommFinalize is ncclSuccess.
  if (its.phase != Phase::kFinalized) broken("ncclCommDestroy before ncclCommFinalize has ended");
  forget(handle);
  ++state().report.destroyed;
  return ncclSuccess;
}

NCCL_DOUBLE_API ncclResult_t ncclCommAbort(ncclComm_t handle) {
  counted("ncclCommAbort");
  const Held its = find(handle, "ncclCommAbort");
  // h:867-883: what follows ncclGroupStart on this thread belongs to the group.
  if (group.depth > 0) broken("ncclCommAbort between ncclGroupStart and ncclGroupEnd");
  its->aborted = true;
  while (its->under_way > 0) nap();
  forget(handle);
  ++state().report.aborted;
  return ncclSuccess;
}

NCCL_DOUBLE_API ncclResult_t ncclAllGather(const void* from, void* to, size_t count,
                                           ncclDataType_t type, ncclComm_t handle,
                                           cudaStream_t stream) {
  Operation made = operation("ncclAllGather", handle, stream);
  Communicator& its = *made.its;
  const std::size_t length = count * size_of(type, "ncclAllGather");
  std::byte* const in = memory(its, from, length, "ncclAllGather");
  std::byte* const out =
      memory(its, to, length * static_cast<std::size_t>(its.world), "ncclAllGather");
  Work work = exchange(
      its, {kAllGather, its.sequence++, count, type}, [&](int) { return std::pair(in, length); },
      [&](int r) { return std::pair(out + static_cast<std::size_t>(r) * length, length); });
  return submit(made, std::move(work), stream, handle);
}

NCCL_DOUBLE_API ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count,
                                               ncclDataType_t type, ncclRedOp_t op,
                                               ncclComm_t handle, cudaStream_t stream) {
  Operation made = operation("ncclReduceScatter", handle, stream);
  Communicator& its = *made.its;
  const std::size_t length = count * size_of(type, "ncclReduceScatter");
  if (op != ncclSum) broken("the double knows sums only");
  std::byte* const in =
      memory(its, from, length * static_cast<std::size_t>(its.world), "ncclReduceScatter");
  Work work = sum(
      its, {kReduceScatter, its.sequence++, count, type}, type, length,
      [&](int r) { return in + static_cast<std::size_t>(r) * length; },
      memory(its, to, length, "ncclReduceScatter"));
  return submit(made, std::move(work), stream, handle);
}

NCCL_DOUBLE_API ncclResult_t ncclAllReduce(const void* from, void* to, size_t count,
                                           ncclDataType_t type, ncclRedOp_t op, ncclComm_t handle,
                                           cudaStream_t stream) {
  Operation made = operation("ncclAllReduce", handle, stream);
  Communicator& its = *made.its;
  const std::size_t length = count * size_of(type, "ncclAllReduce");
  if (op != ncclSum) broken("the double knows sums only");
  std::byte* const in = memory(its, from, length, "ncclAllReduce");
  Work work = sum(
      its, {kAllReduce, its.sequence++, count, type}, type, length, [&](int) { return in; },
      memory(its, to, length, "ncclAllReduce"));
  return submit(made, std::move(work), stream, handle);
}

NCCL_DOUBLE_API ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer,
                                      ncclComm_t handle, cudaStream_t stream) {
  return transfer("ncclSend", true, from, count, type, peer, handle, stream);
}

NCCL_DOUBLE_API ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer,
                                      ncclComm_t handle, cudaStream_t stream) {
  return transfer("ncclRecv", false, to, count, type, peer, handle, stream);
}

NCCL_DOUBLE_API ncclResult_t ncclGroupStart() {
  if (counted("ncclGroupStart") == Fault::kError) return ncclInternalError;
  if (group.depth > 0) broken("ncclGroupStart in a group that was left open");
  ++group.depth;
  return ncclSuccess;
}

NCCL_DOUBLE_API ncclResult_t ncclGroupEnd() {
  const Fault fault = counted("ncclGroupEnd");
  if (group.depth == 0) broken("ncclGroupEnd without ncclGroupStart");
  Group ended = std::exchange(group, {});
  if (fault == Fault::kError) return ncclInternalError;
  if (ended.result != ncclSuccess) return ended.result;
  for (auto& [handle, work] : ended.works) {
    if (fault != Fault::kNone) work.fault = fault;
    begin(std::move(work), ended.stream);
  }
  return ended.works.empty() ? ncclSuccess : ncclInProgress;
}

}  // extern "C"
