// SPDX-License-Identifier: Apache-2.0
// tests/support/child_process.h: code that runs in a process of its own: under its own limits, or
// as another user.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <functional>
#include <string>

namespace ziggurat {

/// What `body` returned in a forked child, or the text of what it threw. The child has one thread,
/// whatever its parent has.
inline std::string in_child_process(const std::function<std::string()>& body) {
  int ends[2];
  if (::pipe(ends) != 0) return "no pipe";
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[0]);
    std::string text;
    try {
      text = body();
    } catch (const std::exception& error) {
      text = error.what();
    }
    const bool written = ::write(ends[1], text.data(), text.size()) >= 0;
    ::_exit(written ? 0 : 1);
  }
  ::close(ends[1]);
  std::string text;
  char buffer[512];
  for (ssize_t n = 0; (n = ::read(ends[0], buffer, sizeof(buffer))) > 0;)
    text.append(buffer, static_cast<std::size_t>(n));
  ::close(ends[0]);
  if (child < 0) return "no child process";
  ::waitpid(child, nullptr, 0);
  return text;
}

}  // namespace ziggurat
