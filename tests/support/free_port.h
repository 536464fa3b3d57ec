// SPDX-License-Identifier: Apache-2.0
// tests/support/free_port.h: a port of this host that nobody listens on.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <cstdint>

namespace ziggurat {

inline std::uint16_t free_port() {
  using boost::asio::ip::tcp;
  boost::asio::io_context context;
  return tcp::acceptor(context, tcp::endpoint(boost::asio::ip::address_v4::loopback(), 0))
      .local_endpoint()
      .port();
}

}  // namespace ziggurat
