// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/unit_gather.h: gathers whole units to the device in stage 3, each from the
// slices of all ranks, in the order in which the gathers are started.
//
// Every rank starts the same gathers in the same order, in a region of the device's memory that is
// set aside. The region has the same size on all ranks and is divided by the same calls. So a unit
// fits on all ranks or on none, and no gather is started that would then have to wait for memory.
// One coroutine makes the gathers, so a slow slice delays the gathers after it.
//
// If ranks cannot reach the device's memory, a unit is gathered in host memory, in pieces. A piece
// is the same part of every slice. A few pieces are under way at once, and each is copied to its
// places on the device.
//
// With a second partition (hpZ of ZeRO++, Wang et al. 2023) a unit is gathered from all ranks once
// in a generation. Each rank of a node then keeps a part of it in host memory, and later gathers
// use the parts of the node. They give the same values, whether the first gather was quantized or
// not. Reactor's thread only.
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
#include "core/schedule/homes/param_home.h"
#include "core/schedule/params/quantized_gather.h"
#include "core/schedule/spare_buffers.h"
#include "core/sharding/reduction.h"
#include "tiers/pool/arena.h"

namespace ziggurat {

class UnitGather {
 public:
  /// Takes `region`, device memory of the same size on every rank. Errors: kResourceExhausted if
  /// host memory has no room for the parts of a second partition, for the codes of quantized units,
  /// or for pieces on their way to the device.
  UnitGather(Context& context, UnitParamHome& home, DeviceBuffer region,
             const ReductionSettings& settings);

  /// Returns how many bytes of the region `unit` takes.
  static std::uint64_t place_bytes(const ChunkTable& table, UnitId unit) noexcept;
  /// Returns the host memory for one piece (of all slices), if units are gathered in pieces. There
  /// are kStagedGathers such buffers.
  static std::uint64_t piece_bytes(const ChunkTable& table, const ReductionSettings& settings);

  /// A unit's place in the region, and the gather that fills it.
  struct Flight {
    UnitId unit;
    std::byte* memory;
    std::uint64_t size_bytes;
    Signal* updated;  ///< set once this rank's slice is at home
    Need need;
    bool wanted = false;           ///< somebody waits for it
    bool from_node = false;        ///< gathered from the parts of this node's ranks
    std::vector<Event> readers{};  ///< readers of the unit in this place
    Signal done;
    Signal vacated;  ///< set once nothing is copied from the place any more
    // Used if the unit is gathered in pieces:
    UnitParamHome::Fetched own{};     ///< this rank's slice, until all ranks have it
    std::uint64_t missing_bytes = 0;  ///< bytes of each slice that have not arrived
    Signal pieces_done;
  };
  /// Starts the gather of `unit` in a place that is free now; returns null if no place is.
  std::shared_ptr<Flight> start(UnitId unit, Need need, Signal& updated);
  /// Notes that somebody reads the unit in its place until `read` happens.
  void used_until(Flight& flight, const Event& read);
  /// Frees the place at once. The next gather there begins only after this one and its readers have
  /// ended.
  void free(const std::shared_ptr<Flight>& flight);
  void hurry(Flight& flight);

  /// Waits until no gather is under way.
  Task<> idle();
  /// Returns a hash of the units that were started since the last call, in order. It is the same on
  /// every rank.
  std::uint64_t take_order() noexcept;

 private:
  using FlightPtr = std::shared_ptr<Flight>;
  /// The part of a unit that each rank of a node keeps.
  struct Part {
    explicit Part(CancelScope& cancel) : there(cancel) {}
    Lease bytes;
    /// The generation that was gathered last or is being gathered.
    std::uint64_t generation = kNone;
    Signal there;  ///< set once `bytes` are of that generation
  };
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};

  Task<> drain();
  Task<> place_vacated(const Flight& flight);
  Task<> issue(const FlightPtr& flight);
  Task<> load_own(const Flight& flight);
  Task<UnitParamHome::Fetched> fetch_own(const Flight& flight);
  std::span<std::byte> own_place(const Flight& flight) const;
  Task<> issue_quantized(const FlightPtr& flight);
  Task<> issue_pieces(const FlightPtr& flight);
  /// The same range of bytes of every slice, side by side in a buffer.
  struct Piece {
    std::uint64_t first_byte;  ///< first byte within a slice
    std::uint64_t size_bytes;
    std::uint64_t slice_bytes;  ///< size of a whole slice
    std::span<std::byte> buffer;
  };
  std::uint64_t piece_share(UnitId unit, int slices) const noexcept;
  Task<> land_piece(FlightPtr flight, Task<> gathering, Piece piece);
  Task<> bring(const Flight& flight, Piece piece);
  Task<> decode(const Flight& flight, QuantizedGather::Codes codes);
  void under_way(const FlightPtr& flight, Task<> gathering, QuantizedGather::Codes codes);
  Task<> land(FlightPtr flight, Task<> gathering, QuantizedGather::Codes codes);
  Task<> keep_part(const Flight& flight);
  std::span<std::byte> part_of(const Flight& flight) const;

  Context& context_;
  UnitParamHome& home_;
  DeviceBuffer region_;
  Arena arena_;
  std::deque<FlightPtr> queue_;
  std::list<FlightPtr> under_way_;  ///< taken from the queue, but not done
  std::vector<FlightPtr> left_;     ///< freed, but perhaps still read
  bool draining_ = false;
  Signal idle_;
  std::uint64_t order_ = 0;
  std::vector<Part> parts_;                     ///< by unit; empty without a second partition
  std::unique_ptr<QuantizedGather> quantized_;  ///< null unless parameters travel in int8
  std::uint64_t piece_bytes_;
  /// Buffers for pieces; null unless units are gathered in pieces.
  std::unique_ptr<SpareBuffers> staging_;
};

}  // namespace ziggurat
