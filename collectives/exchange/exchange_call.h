// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/exchange_call.h: one call under way: announced to its ranks, chunks out to
// those that announced it too, chunks in, sums on workers. Reactor's thread.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/runtime/async.h"
#include "collectives/exchange/exchange_transport.h"
#include "collectives/exchange/frame.h"

namespace ziggurat {

/// What a call moves. Spans by place in `members`, this rank's own empty; all may be.
struct ExchangePlan {
  std::vector<std::span<const std::byte>> out;
  std::vector<std::span<std::byte>> in;
  struct Copy {
    std::span<const std::byte> from;
    std::span<std::byte> to;
  } own;  ///< this rank's own part

  /// With `sums`, what comes in are contributions to `sum`, as long as it is, and `in` is empty.
  bool sums = false;
  DType dtype = DType::kFloat32;
  std::span<const std::byte> contribution;  ///< this rank's
  std::span<std::byte> sum;
  /// Where others' sums land, by place, and where this rank's is to be sent; all_reduce.
  std::vector<std::span<std::byte>> results;

  std::function<void()> finish;  ///< on a worker, when all is there; may be empty
};

class ExchangeCall : public std::enable_shared_from_this<ExchangeCall> {
 public:
  ExchangeCall(ExchangeTransport& transport, const wire::CallKey& key, const wire::CallSpec& spec,
               std::shared_ptr<const std::vector<int>> members, ExchangePlan plan);

  void begin();
  /// A member described the call that it made; `small` is what it sends, if that is little.
  void announced(int rank, const wire::FrameHeader& header, std::span<const std::byte> small);
  std::span<std::byte> landing(int rank, const wire::FrameHeader& header);
  void chunk_arrived(int rank, const wire::FrameHeader& header);
  // Between ranks that read each other's memory.
  void results_ready(int rank, const wire::FrameHeader& header);
  void was_taken(int rank, std::uint8_t part);
  void was_kept(int rank, std::uint8_t part);
  /// Ends it when no worker has its buffers any more.
  void fail(std::exception_ptr error);
  void job_begins() { ++jobs_; }
  void job_ends();
  static Task<> wait(std::shared_ptr<ExchangeCall> self);

  const wire::CallKey& key() const noexcept { return key_; }
  /// Whether something of `rank` is still to come: its announcement, or also (`all`) its chunks.
  bool lacks(int rank, bool all) const;
  std::string describe() const { return wire::describe(spec_, key_.sequence, *members_); }
  /// describe(), and whom it has waited for how long.
  std::string waiting() const;

 private:
  /// Chunks of one member, or sums: one on the wire, the rest with workers.
  static constexpr std::size_t kInFlight = 4;

  /// Workers finish chunks in any order; they are sent in the order of offsets.
  struct Ordered {
    std::map<std::size_t, wire::FrameHeader> ready;  // by offset
    std::size_t next = 0;                            // offset
    /// The next to be sent, if it is ready.
    std::optional<wire::FrameHeader> take();
  };
  struct Member {
    bool announced = false;
    Ordered hashed;
    std::size_t out_begun = 0, out_written = 0, out_in_flight = 0;
    std::size_t landed = 0, taken = 0;  // of contributions, or of what comes in
    std::size_t results_landed = 0, results_taken = 0;
    std::size_t results_written = 0;
    bool is_read = false;       // its memory, for part 0
    std::uint64_t address = 0;  // of what it lends
    bool it_reads = false;      // this rank's memory
    std::size_t read_begun = 0, reads_in_flight = 0;
    bool kept = true;                             // what was read of it
    bool final_sent = false, final_came = false;  // all_reduce
  };
  struct SumChunk {
    std::vector<std::unique_ptr<std::byte[]>> buffers;  // by place
    std::vector<wire::PayloadMark> marks;
    std::size_t arrived = 0;
  };

  std::size_t place_of(int rank) const;
  std::size_t expected(std::size_t place) const;
  bool is_own(std::size_t place) const { return place == own_; }
  void pump(std::size_t place);
  void hash_chunk(std::size_t place, std::size_t offset, std::size_t length);
  void send_hashed(std::size_t place);
  void send_results();
  void contribution_arrived(std::size_t place, std::size_t offset, const wire::PayloadMark& mark);
  void pump_sums();
  void sum_chunk(std::size_t index);
  void begin_reading(std::size_t place, const wire::FrameHeader& header);
  void read_ahead(std::size_t place);
  void tell(std::size_t place, wire::FrameKind kind, std::uint8_t part);
  void send_finals();
  void sum_on_worker(SumChunk& chunk, std::size_t offset, std::size_t length);
  void verify(std::size_t place, std::span<const std::byte> payload,
              const wire::FrameHeader& header) const;
  void read_from(std::size_t place, std::uint64_t address, std::span<std::byte> into) const;
  wire::FrameHeader chunk_header(std::uint8_t part, std::size_t offset, std::size_t length) const;
  bool complete() const;
  void progress() { transport_.moved(); }
  void settle();
  void end();

  ExchangeTransport& transport_;
  wire::CallKey key_;
  wire::CallSpec spec_;
  std::shared_ptr<const std::vector<int>> members_;
  ExchangePlan plan_;
  std::size_t own_ = 0;
  std::vector<Member> state_;
  std::vector<SumChunk> chunks_;
  Ordered sums_;
  std::size_t next_sum_ = 0, sums_in_flight_ = 0;  // chunks
  std::size_t summed_ = 0;
  std::size_t jobs_ = 0;
  bool copied_ = false, finishing_ = false, ended_ = false;
  std::exception_ptr error_;
  Nanoseconds begun_;
  Signal done_;
};

}  // namespace ziggurat
