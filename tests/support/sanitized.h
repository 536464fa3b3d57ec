// SPDX-License-Identifier: Apache-2.0
// tests/support/sanitized.h: ZIGGURAT_SANITIZED where a sanitizer has its own malloc and takes many
// times as long, ZIGGURAT_SANITIZES_THREADS where it is the thread sanitizer. GCC and Clang say so
// in ways of their own.
#pragma once

#if defined(__SANITIZE_THREAD__)
#define ZIGGURAT_SANITIZES_THREADS 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define ZIGGURAT_SANITIZES_THREADS 1
#endif
#endif

#if defined(__SANITIZE_ADDRESS__) || defined(ZIGGURAT_SANITIZES_THREADS)
#define ZIGGURAT_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ZIGGURAT_SANITIZED 1
#endif
#endif

/// Returns how many of `all` cases a campaign in virtual time goes through: a tenth under the
/// thread sanitizer, where all of them take hours, and one thread does everything.
constexpr unsigned campaign_cases(unsigned all) {
#ifdef ZIGGURAT_SANITIZES_THREADS
  return (all + 9) / 10;
#else
  return all;
#endif
}
