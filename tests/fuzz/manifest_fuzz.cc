// SPDX-License-Identifier: Apache-2.0
// tests/fuzz/manifest_fuzz.cc: a manifest whose checksum is right is refused, or is one that we
// could have written.
#include <fmt/format.h>

#include "base/checksum.h"
#include "core/checkpoint/manifest.h"
#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ziggurat;
  const std::string_view rest = fuzz::text_of(data, size);
  // A checksum only keeps accidents out: what comes after it is what is tried.
  const std::string text =
      fmt::format("{{\"checksum\":\"{:016x}\",\n{}",
                  hash64(std::as_bytes(std::span(rest.data(), rest.size())), 0), rest);
  fuzz::taken([&] {
    const Manifest manifest = parse_manifest(text, "fuzz");
    fuzz::require(parse_manifest(to_text(manifest), "fuzz") == manifest);
    const ManifestSummary summary = summarize_manifest(to_text(manifest), "fuzz");
    fuzz::require(summary.content == manifest.content && summary.files == manifest.files);
  });
  fuzz::taken([&] { summarize_manifest(text, "fuzz"); });
  fuzz::taken([&] { line_in(rest, "fuzz"); });
  fuzz::taken([&] { parse_manifest(rest, "fuzz"); });
  fuzz::taken([&] {
    Manifest manifest;
    add_files(manifest, rest, "fuzz");
  });
  return 0;
}
