// SPDX-License-Identifier: Apache-2.0
// collectives/mpi/mpi_link.h: a cluster's MPI as a carrier of messages, and the one thread that
// calls it.
//
// MPI cannot wait for a message and for this process's own requests at once, so the thread looks at
// both in turn. It yields while there is something to do, and naps for 0.1 ms, or 1 ms once nothing
// has come for some time. It touches only its own buffers, never a caller's.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/runtime/clock.h"
#include "collectives/mpi/mpi_functions.h"

namespace ziggurat {

/// Says where libziggurat_mpi.so is, or why there is none; for `ziggurat doctor`. Starts nothing.
std::string mpi_inventory();

/// The bytes of a message. Threads that hold it one after the other share them.
struct MpiMessage {
  std::shared_ptr<std::byte[]> bytes;
  std::size_t size = 0;
};

/// Receives the messages that come under its two tags. Called on the link's thread.
class MpiListener {
 public:
  virtual ~MpiListener() = default;
  virtual void arrived(int from, bool bulk, MpiMessage message) = 0;
  /// Called when MPI itself failed: nothing comes any more.
  virtual void failed(const std::string& why) = 0;
};

class MpiLink {
 public:
  /// The most bulk messages that are received and still held; more are left with MPI.
  static constexpr std::size_t kBulkMax = 16;

  /// Opens libziggurat_mpi.so and starts MPI. All callers get the same link while it lives. After
  /// that it cannot be opened again in this process, because MPI cannot be started twice. Errors:
  /// kUnavailable if there is no such library, no MPI behind it, or MPI's launcher did not start
  /// this process.
  static std::shared_ptr<MpiLink> open();
  /// Ends MPI when all ranks have come to this point. Waits for them at most kPatience, or
  /// kPatienceInTrouble, and then leaves the end to the launcher.
  ~MpiLink();
  MpiLink(const MpiLink&) = delete;
  MpiLink& operator=(const MpiLink&) = delete;

  int rank() const noexcept { return rank_; }
  int world_size() const noexcept { return world_size_; }
  /// Returns MPI's name for itself and the path of the library.
  const std::string& description() const noexcept { return description_; }

  // Any thread.

  /// Sends `message`. `sent` runs on the link's thread when MPI no longer needs the bytes.
  void send(int to, int tag, MpiMessage message, std::function<void()> sent);
  /// Gives messages under `control_tag` and the tag after it (bulk) to `listener` from now on.
  void listen(int control_tag, std::shared_ptr<MpiListener> listener);
  void stop_listening(int control_tag);
  /// Returns the `input` of every rank, in their order. Blocks. Errors: kDeadlineExceeded;
  /// kUnavailable.
  std::vector<std::byte> gather(std::span<const std::byte> input, Nanoseconds patience);
  /// Returns the first tag of a pair that no listener has had. Ranks that ask equally often get
  /// equal tags.
  int next_tags() { return next_tag_.fetch_add(2); }
  /// Notes that something went wrong on this rank: other ranks may never come to the end.
  void in_trouble() noexcept { in_trouble_ = true; }

 private:
  static constexpr Nanoseconds kPatience = std::chrono::minutes(10);
  static constexpr Nanoseconds kPatienceInTrouble = std::chrono::seconds(5);

  struct Sending {
    MpiMessage message;
    MpiHandle request;
    std::function<void()> sent;
  };
  struct Receiving {
    int control_tag = 0;
    int from = 0;
    bool bulk = false;
    bool done = false;
    MpiMessage message;
    MpiHandle request{};
  };
  struct Gathering {
    std::vector<std::byte> input, output;
    MpiHandle request{};
    std::promise<void> done;
  };
  struct Listening {
    int control_tag;
    std::shared_ptr<MpiListener> listener;
  };

  explicit MpiLink(const MpiFunctions& functions) : mpi_(functions) {}
  void start(const std::string& library_path);
  void post(std::function<void()> wish);
  void run();
  bool do_wishes();
  bool take_in();
  bool take_in(const Listening& from, bool bulk);
  bool finish_sends();
  bool finish_receives();
  bool finish_gathers();
  void deliver(Receiving& received);
  void fail(const std::string& why);
  void rest(int idle_rounds);
  void check(int error, const char* what) const;

  const MpiFunctions& mpi_;
  int rank_ = 0;
  int world_size_ = 0;
  std::string description_;
  std::atomic<int> next_tag_{0};
  std::atomic<bool> in_trouble_{false};

  std::mutex mutex_;  // guards the wishes
  std::condition_variable woken_;
  std::deque<std::function<void()>> wishes_;

  // Used by the link's thread only.
  std::list<Sending> sends_;
  std::list<Receiving> receives_;
  std::list<std::shared_ptr<Gathering>> gathers_;
  std::vector<Listening> listening_;
  bool stopping_ = false;
  bool ends_mpi_ = false;
  std::optional<std::string> failure_;
  std::shared_ptr<std::atomic<std::size_t>> bulk_held_ =
      std::make_shared<std::atomic<std::size_t>>(0);
  std::thread thread_;
};

}  // namespace ziggurat
