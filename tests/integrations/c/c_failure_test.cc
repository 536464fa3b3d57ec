// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/c_failure_test.cc: when an engine has failed, each call says so, and looks
// at nothing any more that it was lent.
#include <sys/mman.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>

#include "tests/integrations/c/embedder.h"

namespace ziggurat::testing {
namespace c_failure_test {

/// As long as it lives no file takes a write: drives fail so, at whatever moment.
class FailingDrive {
 public:
  FailingDrive() : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    EXPECT_EQ(::getrlimit(RLIMIT_FSIZE, &limit_), 0);
    const ::rlimit none{.rlim_cur = 0, .rlim_max = limit_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &none), 0);
  }
  ~FailingDrive() {
    ::setrlimit(RLIMIT_FSIZE, &limit_);
    std::signal(SIGXFSZ, handler_);
  }
  FailingDrive(const FailingDrive&) = delete;
  FailingDrive& operator=(const FailingDrive&) = delete;

 private:
  void (*handler_)(int);
  ::rlimit limit_{};
};

/// Memory that ends whoever looks at it, once it is taken away.
class Pages {
 public:
  explicit Pages(std::size_t size_bytes)
      : size_bytes_(size_bytes),
        address_(::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                        -1, 0)) {
    EXPECT_NE(address_, MAP_FAILED);
  }
  ~Pages() { ::munmap(address_, size_bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  void* address() const { return address_; }
  void take_away() const { EXPECT_EQ(::mprotect(address_, size_bytes_, PROT_NONE), 0); }

 private:
  std::size_t size_bytes_;
  void* address_;
};

class CFailure : public Embedder {
 protected:
  void SetUp() override {
    Embedder::SetUp();
    ASSERT_DONE(open(settings()));
    lend_both(1);
    ASSERT_DONE(step());
    ASSERT_DONE(ziggurat_make_durable(engine_));
  }
  /// The engine ends in a step's writes; a gradient of the next step was lent before it said so.
  void fail_with_a_gradient_lent() {
    lend_both(2);
    const FailingDrive drive;
    ASSERT_DONE(step());
    ziggurat_memory memory = ZIGGURAT_INIT(ziggurat_memory);
    memory.dtype = ZIGGURAT_FP32;
    memory.address = gradient_.address();
    memory.size_bytes = kCounts[1] * sizeof(float);
    ziggurat_lend_gradient(engine_, 1, &memory, 1);  // which may say so already
    ASSERT_NE(ziggurat_make_durable(engine_), ZIGGURAT_OK);
    why_ = ziggurat_last_error();
    gradient_.take_away();
  }
  void expect_the_same_words(ziggurat_status status) {
    EXPECT_NE(status, ZIGGURAT_OK);
    EXPECT_EQ(ziggurat_last_error(), why_);
  }

  const Pages gradient_{kCounts[1] * sizeof(float)};
  std::string why_;
};

TEST_F(CFailure, IsSaidByTheNormAndNoGradientIsLookedAt) {
  fail_with_a_gradient_lent();
  if (HasFatalFailure()) return;
  double norm = 0;
  expect_the_same_words(ziggurat_gradient_norm(engine_, &norm));
  TypedArray first = gradient_of(0, 3);
  expect_the_same_words(lend(0, first));
  expect_the_same_words(add(0, first));
  expect_the_same_words(step());
  expect_the_same_words(ziggurat_gradient_norm(engine_, &norm));
}

}  // namespace c_failure_test
}  // namespace ziggurat::testing
