// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/unit_gather.h: stage 3: whole units on the device, each gathered from the
// slices of all ranks, in the order in which they are started.
//
// Every rank starts the same gathers in the same order, in memory of its own: a region of one size
// on all ranks, cut up by the same calls, so that whether a unit fits is the same everywhere and
// nothing is started that then has to wait for memory. One coroutine makes the gathers; a slow
// slice delays those behind it.
//
// Where ranks cannot reach the device's memory a unit is gathered in host memory, in pieces of
// every slice, of which a few are under way, and each is copied to its places.
//
// With a second partition (hpZ of ZeRO++, Wang et al. 2023) a unit that was gathered
// from all ranks once in a generation leaves a part in the host memory of each rank of a node, and
// is gathered from the node's parts from then on: the same values, quantized before or not.
// Reactor's thread only.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/schedule/context.h"
#include "core/schedule/homes.h"
#include "core/schedule/params/quantized_gather.h"
#include "core/schedule/spare_buffers.h"
#include "core/sharding/reduction.h"
#include "tiers/arena.h"

namespace ziggurat {

class UnitGather {
 public:
  /// `region`: device memory, as long on every rank.
  /// Errors: kResourceExhausted where host memory does not hold the parts of a second partition,
  /// the codes of quantized units, or pieces on their way to the device.
  UnitGather(Context& context, ParamHome& home, DeviceBuffer region,
             const ReductionSettings& settings);

  /// Bytes of region that `unit` takes.
  static std::uint64_t place_bytes(const ChunkTable& table, UnitId unit) noexcept;
  /// Host memory for a piece, all slices' of it, where units are gathered so; kStagedGathers are
  /// taken.
  static std::uint64_t piece_bytes(const ChunkTable& table, const ReductionSettings& settings);

  /// A unit's place, and the gather that fills it.
  struct Flight {
    UnitId unit;
    std::byte* memory;
    std::uint64_t size_bytes;
    Signal* updated;  ///< this rank's slice is at home
    Need need;
    bool wanted = false;           ///< somebody waits
    bool from_node = false;        ///< gathered from the parts of this node's ranks
    std::vector<Event> readers{};  ///< of what lies there
    Signal done;
    Signal vacated;  ///< and nothing is copied from it any more
    // Where it is gathered in pieces:
    ParamHome::Fetched own{};         ///< this rank's slice, until all have it
    std::uint64_t missing_bytes = 0;  ///< of each slice
    Signal pieces_done;
  };
  /// Starts the gather of `unit` in a place that is free now; nullptr if none is.
  std::shared_ptr<Flight> start(UnitId unit, Need need, Signal& updated);
  /// Somebody reads what lies in the flight's place until `read` happens.
  void used_until(Flight& flight, const Event& read);
  /// Frees the place at once; a gather under way there ends before the next begins, and so does
  /// what reads it.
  void free(const std::shared_ptr<Flight>& flight);
  void hurry(Flight& flight);

  /// Nothing is under way.
  Task<> idle();
  /// Which units were started since the last call, in order, as a hash: the same on every rank.
  std::uint64_t take_order() noexcept;

 private:
  using FlightPtr = std::shared_ptr<Flight>;
  /// What each rank of a node keeps of a unit.
  struct Part {
    explicit Part(CancelScope& cancel) : there(cancel) {}
    Lease bytes;
    std::uint64_t generation = kNone;  ///< that was gathered last, or is being
    Signal there;                      ///< of that generation
  };
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};

  Task<> drain();
  Task<> place_vacated(const Flight& flight);
  Task<> issue(const FlightPtr& flight);
  Task<> load_own(const Flight& flight);
  Task<ParamHome::Fetched> fetch_own(const Flight& flight);
  std::span<std::byte> own_place(const Flight& flight) const;
  Task<> issue_quantized(const FlightPtr& flight);
  Task<> issue_pieces(const FlightPtr& flight);
  /// The same run of every slice, side by side in a buffer.
  struct Piece {
    std::uint64_t first_byte;  ///< of a slice
    std::uint64_t size_bytes;
    std::uint64_t slice_bytes;  ///< a whole one
    std::span<std::byte> buffer;
  };
  std::uint64_t piece_share(int slices) const noexcept;
  Task<> land_piece(FlightPtr flight, Task<> gathering, Piece piece);
  Task<> bring(const Flight& flight, Piece piece);
  Task<> decode(const Flight& flight, QuantizedGather::Codes codes);
  void under_way(const FlightPtr& flight, Task<> gathering, QuantizedGather::Codes codes);
  Task<> land(FlightPtr flight, Task<> gathering, QuantizedGather::Codes codes);
  Task<> keep_part(const Flight& flight);
  std::span<std::byte> part_of(const Flight& flight) const;

  Context& context_;
  ParamHome& home_;
  DeviceBuffer region_;
  Arena arena_;
  std::deque<FlightPtr> queue_;
  std::list<FlightPtr> under_way_;  ///< taken from the queue, not done
  std::vector<FlightPtr> left_;     ///< freed, and perhaps still read
  bool draining_ = false;
  Signal idle_;
  std::uint64_t order_ = 0;
  std::vector<Part> parts_;                     ///< by unit; none without a second partition
  std::unique_ptr<QuantizedGather> quantized_;  ///< if parameters travel so
  std::uint64_t piece_bytes_;
  std::unique_ptr<SpareBuffers> staging_;  ///< for pieces, where units are gathered in them
};

}  // namespace ziggurat
