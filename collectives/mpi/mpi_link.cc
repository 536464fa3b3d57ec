// SPDX-License-Identifier: Apache-2.0
// collectives/mpi/mpi_link.cc: the loop of the thread that owns MPI.
#include "collectives/mpi/mpi_link.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <future>
#include <utility>

#include "base/log.h"
#include "base/topology/core_budget.h"
#include "collectives/shared_library.h"

namespace ziggurat {
namespace {

constexpr int kEagerRounds = 200;  // rounds before the first nap
constexpr int kShortNaps = 2'000;  // naps before they get longer
constexpr Nanoseconds kShortNap = std::chrono::microseconds(100);
constexpr Nanoseconds kLongNap = std::chrono::milliseconds(1);
constexpr std::array kPlaces{"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"};

/// Throws unless MPI's launcher started this process: otherwise an MPI makes a job of one rank, or
/// ends the process.
void require_launcher() {
  if (std::ranges::any_of(kPlaces,
                          [](const char* name) { return process_environment(name).has_value(); })) {
    return;
  }
  throw Error(ErrorCode::kUnavailable,
              "MPI's launcher did not start this process (none of OMPI_COMM_WORLD_RANK, PMIX_RANK, "
              "PMI_RANK is set): start the ranks with mpirun, or srun --mpi=pmix");
}

SharedLibrary open_library() {
  return SharedLibrary::open(own_library_names("libziggurat_mpi.so"),
                             "build ziggurat where an MPI is installed (Debian: libopenmpi-dev), "
                             "and keep that MPI installed; or use `collectives=auto`");
}

}  // namespace

std::string mpi_inventory() {
  try {
    return open_library().path() + ", under mpirun or srun";
  } catch (const Error& error) {
    return std::string("none: ") + error.what();
  }
}

std::shared_ptr<MpiLink> MpiLink::open() {
  // A process can have only one MPI, and start it only once. This global state is MPI's.
  static std::mutex one_at_a_time;
  static std::weak_ptr<MpiLink> living;
  static bool was_open = false;
  const std::lock_guard lock(one_at_a_time);
  if (auto link = living.lock()) return link;
  require_launcher();
  const SharedLibrary library = open_library();
  const MpiFunctions& functions = *library.function<GetMpiFunctions>(kMpiFunctionsSymbol)();
  if (functions.version != MpiFunctions::kVersion) {
    throw Error(
        ErrorCode::kUnavailable,
        fmt::format("{} has version {}, but this program needs version {}: build both together",
                    library.path(), functions.version, MpiFunctions::kVersion));
  }
  if (std::exchange(was_open, true)) {
    throw Error(
        ErrorCode::kUnavailable,
        "MPI was already started and ended in this process, and it cannot be started twice");
  }
  std::shared_ptr<MpiLink> link(new MpiLink(functions));
  link->start(library.path());
  living = link;
  return link;
}

void MpiLink::start(const std::string& library_path) {
  std::promise<void> started;
  thread_ = std::thread([&] {
    try {
      std::array<char, 256> name{};
      check(mpi_.begin(&rank_, &world_size_, name.data(), name.size()), "MPI_Init_thread");
      description_ = fmt::format("{}, by {}", name.data(), library_path);
      started.set_value();
    } catch (...) {
      started.set_exception(std::current_exception());
      return;
    }
    run();
  });
  try {
    started.get_future().get();
  } catch (...) {
    thread_.join();
    throw;
  }
}

MpiLink::~MpiLink() {
  if (!thread_.joinable()) return;
  bool all_here = true;
  try {
    gather(std::as_bytes(std::span("end", 1)), in_trouble_ ? kPatienceInTrouble : kPatience);
  } catch (const Error& error) {
    // MPI_Finalize would wait for all ranks for ever.
    log().info("MPI could not be shut down cleanly: {}", error.what());
    all_here = false;
  }
  post([this, all_here] {
    stopping_ = true;
    ends_mpi_ = all_here;
  });
  thread_.join();
}

void MpiLink::check(int error, const char* what) const {
  if (error == 0) return;
  std::array<char, 512> text{};
  mpi_.error_text(error, text.data(), text.size());
  throw Error(ErrorCode::kUnavailable, fmt::format("{}: {}", what, text.data()), error);
}

void MpiLink::post(std::function<void()> wish) {
  const std::lock_guard lock(mutex_);
  wishes_.push_back(std::move(wish));
  woken_.notify_one();
}

void MpiLink::send(int to, int tag, MpiMessage message, std::function<void()> sent) {
  post([this, to, tag, message = std::move(message), sent = std::move(sent)]() mutable {
    if (failure_) return;
    Sending& sending = sends_.emplace_back(std::move(message), MpiHandle{}, std::move(sent));
    const int size = static_cast<int>(sending.message.size);
    check(mpi_.send(sending.message.bytes.get(), size, to, tag, &sending.request), "MPI_Isend");
  });
}

void MpiLink::listen(int control_tag, std::shared_ptr<MpiListener> listener) {
  post([this, control_tag, listener = std::move(listener)] {
    if (failure_) return listener->failed(*failure_);
    listening_.push_back({control_tag, listener});
  });
}

void MpiLink::stop_listening(int control_tag) {
  post([this, control_tag] {
    std::erase_if(listening_, [&](const Listening& it) { return it.control_tag == control_tag; });
  });
}

std::vector<std::byte> MpiLink::gather(std::span<const std::byte> input, Nanoseconds patience) {
  const auto gathering = std::make_shared<Gathering>();
  gathering->input.assign(input.begin(), input.end());
  gathering->output.resize(input.size() * static_cast<std::size_t>(world_size_));
  std::future<void> all_here = gathering->done.get_future();
  post([this, gathering] {
    gathers_.push_back(gathering);
    if (failure_) return fail(*failure_);
    check(mpi_.gather(gathering->input.data(), static_cast<int>(gathering->input.size()),
                      gathering->output.data(), &gathering->request),
          "MPI_Iallgather");
  });
  if (all_here.wait_for(patience) != std::future_status::ready) {
    throw Error(
        ErrorCode::kDeadlineExceeded,
        fmt::format("rank {} of {} waited in vain: not all ranks joined through MPI within {} s",
                    rank_, world_size_,
                    std::chrono::duration_cast<std::chrono::seconds>(patience).count()));
  }
  all_here.get();
  return gathering->output;
}

void MpiLink::fail(const std::string& why) {
  failure_ = why;
  for (const Listening& listening : listening_) listening.listener->failed(why);
  listening_.clear();
  const auto failure = std::make_exception_ptr(Error(ErrorCode::kUnavailable, why));
  for (const auto& gathering : gathers_) gathering->done.set_exception(failure);
  gathers_.clear();
}

/// Runs until told to stop. After an error of MPI it only waits for that.
void MpiLink::run() {
  int idle_rounds = 0;
  while (!stopping_) {
    bool busy = false;
    try {
      busy = do_wishes();
      if (!failure_) {
        // Each of these functions runs in every round.
        busy = take_in() || busy;
        busy = finish_receives() || busy;
        busy = finish_sends() || busy;
        busy = finish_gathers() || busy;
      }
    } catch (const Error& error) {
      fail(error.what());
    }
    if (busy) {
      idle_rounds = 0;
    } else {
      rest(idle_rounds = std::min(idle_rounds + 1, kEagerRounds + kShortNaps));
    }
  }
  if (ends_mpi_ && !failure_) {
    if (const int error = mpi_.end()) log().warn("MPI_Finalize: error {}", error);
  }
}

bool MpiLink::do_wishes() {
  for (bool any = false;; any = true) {
    std::function<void()> wish;
    {
      const std::lock_guard lock(mutex_);
      if (wishes_.empty()) return any;
      wish = std::move(wishes_.front());
      wishes_.pop_front();
    }
    wish();
  }
}

void MpiLink::rest(int idle_rounds) {
  if (idle_rounds < kEagerRounds) {
    std::this_thread::yield();
    return;
  }
  std::unique_lock lock(mutex_);
  woken_.wait_for(lock, idle_rounds < kEagerRounds + kShortNaps ? kShortNap : kLongNap,
                  [this] { return !wishes_.empty(); });
}

bool MpiLink::take_in() {
  bool found = false;
  for (const Listening& listening : listening_) {
    while (take_in(listening, false)) found = true;
    while (*bulk_held_ < kBulkMax && take_in(listening, true)) found = true;
  }
  return found;
}

bool MpiLink::take_in(const Listening& from, bool bulk) {
  int found = 0;
  MpiArrival arrival;
  check(mpi_.probe(from.control_tag + (bulk ? 1 : 0), &found, &arrival), "MPI_Improbe");
  if (found == 0) return false;
  Receiving received;
  received.control_tag = from.control_tag;
  received.from = arrival.from;
  received.bulk = bulk;
  received.message.size = static_cast<std::size_t>(arrival.size_bytes);
  if (bulk) ++*bulk_held_;
  received.message.bytes = std::shared_ptr<std::byte[]>(
      new std::byte[received.message.size], [bulk, held = bulk_held_](std::byte* bytes) {
        delete[] bytes;
        if (bulk) --*held;
      });
  Receiving& kept = receives_.emplace_back(std::move(received));
  check(mpi_.receive(kept.message.bytes.get(), arrival.size_bytes, &arrival.message, &kept.request),
        "MPI_Imrecv");
  return true;
}

/// Delivers messages in the order in which they came, for each sender and tag.
bool MpiLink::finish_receives() {
  bool progress = false;
  for (auto it = receives_.begin(); it != receives_.end();) {
    if (!it->done) {
      int done = 0;
      check(mpi_.test(&it->request, &done), "MPI_Test of a receive");
      it->done = done != 0;
    }
    const bool is_next = std::none_of(receives_.begin(), it, [&](const Receiving& before) {
      return before.control_tag == it->control_tag && before.from == it->from &&
             before.bulk == it->bulk;
    });
    if (!it->done || !is_next) {
      ++it;
      continue;
    }
    deliver(*it);
    it = receives_.erase(it);
    progress = true;
  }
  return progress;
}

void MpiLink::deliver(Receiving& received) {
  const auto to = std::ranges::find(listening_, received.control_tag, &Listening::control_tag);
  if (to == listening_.end()) return;  // the listener has stopped since
  to->listener->arrived(received.from, received.bulk, std::move(received.message));
}

bool MpiLink::finish_sends() {
  bool progress = false;
  for (auto it = sends_.begin(); it != sends_.end();) {
    int done = 0;
    check(mpi_.test(&it->request, &done), "MPI_Test of a send");
    if (done == 0) {
      ++it;
      continue;
    }
    const Sending sending = std::move(*it);
    it = sends_.erase(it);
    sending.sent();
    progress = true;
  }
  return progress;
}

bool MpiLink::finish_gathers() {
  bool progress = false;
  for (auto it = gathers_.begin(); it != gathers_.end();) {
    int done = 0;
    check(mpi_.test(&(*it)->request, &done), "MPI_Test of a gather");
    if (done == 0) {
      ++it;
      continue;
    }
    const std::shared_ptr<Gathering> gathering = *it;
    it = gathers_.erase(it);
    gathering->done.set_value();
    progress = true;
  }
  return progress;
}

}  // namespace ziggurat
