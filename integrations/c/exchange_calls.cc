// SPDX-License-Identifier: Apache-2.0
// integrations/c/exchange_calls.cc: the C functions of exchanges.
#include <fmt/format.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <span>

#include "integrations/c/c_call.h"
#include "integrations/c/embedded_exchange.h"
#include "integrations/c/wrong.h"
#include "integrations/c/ziggurat.h"

namespace {

using ziggurat::bytes_of;
using ziggurat::EmbeddedExchange;
using ziggurat::guarded;
using ziggurat::required;
using ziggurat::room_of;
using ziggurat::runtimes;
using ziggurat::wrong;

/// An exchange that a caller has open. It keeps its runtime, which cannot be destroyed meanwhile.
struct OpenExchange {
  std::shared_ptr<ziggurat::Runtime> runtime;
  std::unique_ptr<EmbeddedExchange> exchange;
};

/// Never destroyed, as runtimes().
ziggurat::Handles<OpenExchange>& exchanges() {
  static auto& all = *new ziggurat::Handles<OpenExchange>("exchange");
  return all;
}

/// Returns how many bytes one slice from each rank has in all.
std::uint64_t bytes_of_all(const EmbeddedExchange& exchange, std::uint64_t slice_bytes,
                           const char* what) {
  const std::uint64_t ranks = exchange.world_size();
  if (slice_bytes > std::numeric_limits<std::uint64_t>::max() / ranks)
    throw wrong(
        fmt::format("{}: {} bytes for each of {} ranks are more than 64 bits can count: give fewer",
                    what, slice_bytes, ranks));
  return slice_bytes * ranks;
}

}  // namespace

ziggurat_status ziggurat_exchange_open(ziggurat_runtime runtime, const char* name,
                                       ziggurat_exchange* exchange) {
  return guarded([&] {
    *required(exchange, "exchange") = 0;
    auto open = std::make_shared<OpenExchange>();
    open->runtime = runtimes().find(runtime);
    open->exchange = std::make_unique<EmbeddedExchange>(*open->runtime, required(name, "name"));
    *exchange = exchanges().add(std::move(open));
  });
}

ziggurat_status ziggurat_exchange_close(ziggurat_exchange exchange) {
  return guarded([&] { exchanges().take(exchange); });
}

ziggurat_status ziggurat_begin_all_to_all(ziggurat_exchange exchange, const void* input,
                                          void* output, uint64_t slice_bytes, uint64_t* ticket) {
  return guarded([&] {
    const std::shared_ptr<OpenExchange> open = exchanges().find(exchange);
    EmbeddedExchange& its = *open->exchange;
    const std::uint64_t all = bytes_of_all(its, slice_bytes, "slice_bytes");
    *required(ticket, "ticket") =
        its.begin_all_to_all(bytes_of(input, all, "input"), room_of(output, all, "output"));
  });
}

ziggurat_status ziggurat_begin_all_gather(ziggurat_exchange exchange, const void* input,
                                          void* output, uint64_t input_bytes, uint64_t* ticket) {
  return guarded([&] {
    const std::shared_ptr<OpenExchange> open = exchanges().find(exchange);
    EmbeddedExchange& its = *open->exchange;
    const std::uint64_t all = bytes_of_all(its, input_bytes, "input_bytes");
    *required(ticket, "ticket") =
        its.begin_all_gather(bytes_of(input, input_bytes, "input"), room_of(output, all, "output"));
  });
}

ziggurat_status ziggurat_begin_all_reduce_doubles(ziggurat_exchange exchange, double* values,
                                                  uint64_t count, uint64_t* ticket) {
  return guarded([&] {
    const std::shared_ptr<OpenExchange> open = exchanges().find(exchange);
    EmbeddedExchange& its = *open->exchange;
    const std::span<double> all(count == 0 ? nullptr : required(values, "values"), count);
    *required(ticket, "ticket") = its.begin_all_reduce(all);
  });
}

ziggurat_status ziggurat_begin_barrier(ziggurat_exchange exchange, uint64_t* ticket) {
  return guarded(
      [&] { *required(ticket, "ticket") = exchanges().find(exchange)->exchange->begin_barrier(); });
}

ziggurat_status ziggurat_finish(ziggurat_exchange exchange, uint64_t ticket) {
  return guarded([&] { exchanges().find(exchange)->exchange->finish(ticket); });
}
