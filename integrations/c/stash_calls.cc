// SPDX-License-Identifier: Apache-2.0
// integrations/c/stash_calls.cc: the C functions of stashes.
#include <fmt/format.h>

#include <cstdint>
#include <memory>

#include "core/engine/stash/activation_stash.h"
#include "integrations/c/c_call.h"
#include "integrations/c/engine_calls.h"
#include "integrations/c/settings_json.h"
#include "integrations/c/wrong.h"
#include "integrations/c/ziggurat.h"

namespace {

using ziggurat::ActivationStash;
using ziggurat::bytes_of;
using ziggurat::copied;
using ziggurat::give;
using ziggurat::guarded;
using ziggurat::required;
using ziggurat::room_of;
using ziggurat::runtimes;
using ziggurat::wrong;

/// A stash that a caller has open. It keeps its runtime, which cannot be destroyed meanwhile.
struct OpenStash {
  std::shared_ptr<ziggurat::Runtime> runtime;
  std::unique_ptr<ActivationStash> stash;
};

/// Never destroyed, as runtimes().
ziggurat::Handles<OpenStash>& stashes() {
  static auto& all = *new ziggurat::Handles<OpenStash>("stash");
  return all;
}

}  // namespace

ziggurat_status ziggurat_stash_open(ziggurat_runtime runtime, const char* settings,
                                    ziggurat_stash* stash) {
  return guarded([&] {
    *required(stash, "stash") = 0;
    const ziggurat::StashSettings its =
        ziggurat::stash_settings_of(settings == nullptr ? "{}" : settings);
    auto open = std::make_shared<OpenStash>();
    open->runtime = runtimes().find(runtime);
    open->stash = std::make_unique<ActivationStash>(*open->runtime, its.store, its.memory_bytes);
    *stash = stashes().add(std::move(open));
  });
}

ziggurat_status ziggurat_stash_close(ziggurat_stash stash) {
  return guarded([&] {
    if (!stashes().remove_if_unused(stash))
      throw wrong(fmt::format("stash {} is in use: wait for its other calls to end", stash));
  });
}

ziggurat_status ziggurat_stash_put(ziggurat_stash stash, const void* bytes, uint64_t size_bytes,
                                   uint64_t* ticket) {
  return guarded([&] {
    const std::shared_ptr<OpenStash> open = stashes().find(stash);
    *required(ticket, "ticket") = 0;
    if (size_bytes == 0) throw wrong("size_bytes is 0: an item has at least one byte");
    *ticket = open->stash->put(bytes_of(bytes, size_bytes, "bytes"));
  });
}

ziggurat_status ziggurat_stash_read(ziggurat_stash stash, uint64_t ticket, void* address,
                                    uint64_t offset_bytes, uint64_t size_bytes) {
  return guarded([&] {
    const std::shared_ptr<OpenStash> open = stashes().find(stash);
    open->stash->read(
        ticket, {.offset_bytes = offset_bytes, .into = room_of(address, size_bytes, "address")});
  });
}

ziggurat_status ziggurat_stash_take(ziggurat_stash stash, uint64_t size_bytes, uint64_t* ticket,
                                    void** address) {
  return guarded([&] {
    const std::shared_ptr<OpenStash> open = stashes().find(stash);
    *required(ticket, "ticket") = 0;
    *required(address, "address") = nullptr;
    if (size_bytes == 0) throw wrong("size_bytes is 0: an item has at least one byte");
    const ziggurat::Stash::Room room = open->stash->take(size_bytes);
    *address = room.bytes.data();
    *ticket = room.ticket;
  });
}

ziggurat_status ziggurat_stash_filled(ziggurat_stash stash, uint64_t ticket) {
  return guarded([&] { stashes().find(stash)->stash->filled(ticket); });
}

ziggurat_status ziggurat_stash_lend(ziggurat_stash stash, uint64_t ticket, uint64_t* loan,
                                    void** address) {
  return guarded([&] {
    const std::shared_ptr<OpenStash> open = stashes().find(stash);
    *required(loan, "loan") = 0;
    *required(address, "address") = nullptr;
    const ziggurat::Stash::Loan its = open->stash->lend(ticket);
    *address = its.bytes.data();
    *loan = its.number;
  });
}

ziggurat_status ziggurat_stash_give_back(ziggurat_stash stash, uint64_t loan) {
  return guarded([&] { stashes().find(stash)->stash->give_back(loan); });
}

ziggurat_status ziggurat_stash_drop(ziggurat_stash stash, uint64_t ticket) {
  return guarded([&] { stashes().find(stash)->stash->drop(ticket); });
}

ziggurat_status ziggurat_stash_figures(ziggurat_stash stash, ziggurat_stash_state* figures) {
  return guarded([&] {
    const std::shared_ptr<OpenStash> open = stashes().find(stash);
    ziggurat_stash_state own = copied(figures, "figures");
    const ziggurat::StashFigures its = open->stash->figures();
    own.put_bytes = its.put_bytes;
    own.written_bytes = its.written_bytes;
    own.read_bytes = its.read_bytes;
    own.brought_ahead_bytes = its.brought_ahead_bytes;
    own.memory_peak_bytes = its.memory_peak_bytes;
    own.waited_to_put_s = its.waited_to_put_s;
    own.waited_to_read_s = its.waited_to_bring_s;
    own.lent_bytes = its.lent_bytes;
    give(own, figures);
  });
}
