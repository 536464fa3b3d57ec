// SPDX-License-Identifier: Apache-2.0
// tests/io_paths/run_confined.cc: runs a command as a container runtime's default profile would:
// without io_uring and without memory policy. `run_confined [--enosys] COMMAND [ARGUMENT...]`
//
// Docker's and containerd's profiles answer EPERM; an older kernel, and some sandboxes, ENOSYS to
// io_uring. Children inherit the filter.
#include <seccomp.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string_view>

namespace {

bool forbid(scmp_filter_ctx filter, int error_number, const char* name) {
  const int call = ::seccomp_syscall_resolve_name(name);
  const int result =
      ::seccomp_rule_add(filter, SCMP_ACT_ERRNO(static_cast<unsigned>(error_number)), call, 0);
  if (result == 0) return true;
  std::fprintf(stderr, "run_confined: a rule for %s: %s\n", name, std::strerror(-result));
  return false;
}

bool confine(int io_uring_error) {
  const scmp_filter_ctx filter = ::seccomp_init(SCMP_ACT_ALLOW);
  if (filter == nullptr) return false;
  bool made = true;
  for (const char* name : {"io_uring_setup", "io_uring_enter", "io_uring_register"}) {
    made = made && forbid(filter, io_uring_error, name);
  }
  for (const char* name : {"mbind", "set_mempolicy", "get_mempolicy"}) {
    made = made && forbid(filter, EPERM, name);
  }
  const int result = made ? ::seccomp_load(filter) : -EINVAL;
  ::seccomp_release(filter);
  if (result != 0) std::fprintf(stderr, "run_confined: seccomp_load: %s\n", std::strerror(-result));
  return result == 0;
}

}  // namespace

int main(int argc, char** argv) {
  const bool enosys = argc > 1 && std::string_view(argv[1]) == "--enosys";
  char** const command = argv + (enosys ? 2 : 1);
  if (*command == nullptr) {
    std::fprintf(stderr, "usage: run_confined [--enosys] COMMAND [ARGUMENT...]\n");
    return 2;
  }
  if (!confine(enosys ? ENOSYS : EPERM)) return 3;
  ::execvp(command[0], command);
  std::fprintf(stderr, "run_confined: %s: %s\n", command[0], std::strerror(errno));
  return 4;
}
