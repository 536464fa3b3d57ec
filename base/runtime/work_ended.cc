// SPDX-License-Identifier: Apache-2.0
// base/runtime/work_ended.cc: keeps the count as a service of the reactor's io_context.
#include "base/runtime/work_ended.h"

#include <boost/asio/execution_context.hpp>

namespace ziggurat {
namespace {

namespace asio = boost::asio;

class WorkCount final : public asio::execution_context::service {
 public:
  static inline asio::execution_context::id id;

  explicit WorkCount(asio::execution_context& context) : service(context) {}
  void shutdown() override {}

  std::uint64_t ended = 0;
};

WorkCount& count_of(Reactor& reactor) { return asio::use_service<WorkCount>(reactor.context()); }

}  // namespace

void work_ended(Reactor& reactor) {
  reactor.external_end();
  ++count_of(reactor).ended;
}

std::uint64_t work_ended_count(Reactor& reactor) { return count_of(reactor).ended; }

}  // namespace ziggurat
