// SPDX-License-Identifier: Apache-2.0
// integrations/cli/ckpt.cc: `ziggurat ckpt inspect`, `verify` and `diff`: what a checkpoint or
// store holds, whether its bytes are intact, and in which tensors two of them differ. Needs no GPU
// and no trainer.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

#include "base/bytes.h"
#include "base/error.h"
#include "core/checkpoint/joined_state.h"
#include "integrations/cli/checkpoint_files.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/console.h"
#include "optimizer/state_format.h"

namespace ziggurat::cli {
namespace {

constexpr std::size_t kNamesShown = 20;

std::unique_ptr<Runtime> make_runtime() {
  return Runtime::create({.threads = 0, .trace_path = ""});
}

std::uint64_t files_bytes(const Manifest& manifest) {
  std::uint64_t total = 0;
  for (const StateFile& file : manifest.files) total += file.size_bytes;
  return total;
}

std::string state_text(const StateContent& content) {
  return content.state ? to_string(*content.state) : std::string("weights alone");
}

std::string line_text(const StateLine& line) {
  return fmt::format(
      "it belongs to the line of history {}{}, which was opened {} time{}", to_text(line.id),
      line.parent
          ? fmt::format(" (branched off {} at step {})", short_text(*line.parent), line.left_at)
          : "",
      line.epoch, line.epoch == 1 ? "" : "s");
}

void say_resume(Console& console, const StateContent& content) {
  const std::vector<std::string> missing = missing_resume_names(content);
  console.line(fmt::format("resume_manifest_complete: {}", missing.empty()));
  if (!missing.empty()) console.line(fmt::format("  missing: {}", fmt::join(missing, ", ")));
}

void say_layout(Console& console, const SavedLayout& layout) {
  console.line(fmt::format(
      "  it was saved by {} rank{}{} with ZeRO stage {}, {} ranks to each copy of the state, and "
      "placement {}",
      layout.ranks, layout.ranks == 1 ? "" : "s",
      layout.tensor_parallel > 1
          ? fmt::format(" in groups of {} that divide the layers", layout.tensor_parallel)
          : "",
      layout.zero_stage, layout.shard_group, layout.placement));
}

/// Says of which whole parameters the tensors of a store are pieces, as far as the store says it.
std::string pieces_text(StoredState& store) {
  try {
    const JoinedState whole(store, "putting its pieces together");
    const std::size_t count = whole.content().units.size();
    return fmt::format("its tensors are pieces of {} whole parameter{}", count,
                       count == 1 ? "" : "s");
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInvalidArgument)
      return "only that trainer knows which of its tensors these are pieces of";
    return error.what();
  }
}

/// Reads every byte of the checkpoint and compares it with the manifest's hashes.
Task<> prove_all(CheckpointReader& reader, Console& console) {
  const Manifest& manifest = reader.manifest();
  const std::uint64_t total = files_bytes(manifest);
  std::uint64_t done = 0;
  for (std::size_t f = 0; f < manifest.files.size(); ++f) {
    co_await reader.prove_header(f);
    done += manifest.files[f].header_bytes;
  }
  for (const StatePiece& piece : manifest.pieces) {
    co_await reader.prove(piece);
    for (const HashedBytes& hashed : piece.hashed) done += hashed.size_bytes;
    console.progress("verifying", done, total);
  }
}

/// The number of elements in which a tensor differs between two states.
struct Difference {
  std::uint64_t elements = 0;
};
Task<Difference> compare(StateSource& a, StateSource& b, std::size_t in_a, std::size_t in_b) {
  const std::uint64_t size = size_bytes(a.content().tensors[in_a].type);
  Difference found;
  const Slice take = [&](const TensorRun& run, std::span<const std::byte> ours) -> Task<> {
    std::vector<std::byte> theirs(ours.size());
    co_await b.read(in_b, std::span(&run, 1), theirs);
    for (std::uint64_t i = 0; i < run.count; ++i)
      found.elements += std::memcmp(&ours[i * size], &theirs[i * size], size) != 0 ? 1 : 0;
  };
  co_await for_each_slice(a, in_a, take);
  co_return found;
}

std::map<std::string, std::size_t> by_name(const StateContent& content) {
  std::map<std::string, std::size_t> names;
  for (std::size_t t = 0; t < content.tensors.size(); ++t) names[content.tensors[t].name] = t;
  return names;
}

}  // namespace

int ckpt_inspect(const CkptCommand& command) {
  Console console;
  const auto runtime = make_runtime();
  CheckpointFiles files(*runtime, command.paths.at(0));
  const StateContent& content = files.source().content();
  console.line(fmt::format("{}: {} at step {}, parameters in {}, {}", files.source().place(),
                           content.model, content.step, to_string(content.dtype),
                           state_text(content)));
  if (const CheckpointReader* checkpoint = files.checkpoint()) {
    const Manifest& manifest = checkpoint->manifest();
    console.line(fmt::format("  a checkpoint: {} tensors in {} files, {}", content.tensors.size(),
                             manifest.files.size(), format_bytes(files_bytes(manifest))));
  } else if (const SafetensorsSource* weights = files.weights()) {
    console.line(fmt::format(
        "  weights that another tool saved: {} tensors{}", content.tensors.size(),
        weights->left_out().empty() ? ""
                                    : fmt::format("; left out because they are not parameters: {}",
                                                  fmt::join(weights->left_out(), ", "))));
    return 0;
  } else {
    console.line(fmt::format("  a store: {} tensors", content.tensors.size()));
  }
  if (!content.state) return 0;  // weights alone do not belong to a run
  if (files.store() != nullptr && files.store()->of_pieces()) {
    console.line(fmt::format(
        "  it was saved by {} rank{} of a trainer that lends its parameters to the engine, as "
        "PyTorch's does; {}",
        content.layout.ranks, content.layout.ranks == 1 ? "" : "s", pieces_text(*files.store())));
  } else {
    say_layout(console, content.layout);
  }
  console.line(fmt::format("  run: {}", content.run_identity));
  if (content.line) console.line("  " + line_text(*content.line));
  console.line(fmt::format("  numerics: {}", content.numerics_fingerprint));
  for (const auto& [name, text] : content.resume) console.line(fmt::format("  {}: {}", name, text));
  console.line(fmt::format("  the trainer's own data has {} bytes", content.blob.size()));
  if (files.checkpoint() != nullptr) say_resume(console, content);
  return 0;
}

int ckpt_verify(const CkptCommand& command) {
  Console console;
  const auto runtime = make_runtime();
  CheckpointFiles files(*runtime, command.paths.at(0));
  const StateContent& content = files.source().content();
  const std::string what =
      fmt::format("{}: {} at step {}", files.source().place(), content.model, content.step);
  if (StoredState* store = files.store()) {
    const auto progress = [&](std::uint64_t done, std::uint64_t total) {
      console.progress("verifying", done, total);
    };
    runtime->reactor.block_on(store->prove(progress));
    for (const std::string& note : store->notes()) console.line(note);
    console.line(fmt::format("{}: every record is intact", what));
    return 0;
  }
  if (files.weights() != nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: safetensors files contain no hashes, so they cannot be verified; "
                            "make a checkpoint of them with `ziggurat ckpt from-hf`",
                            files.source().place()));
  }
  const Manifest& manifest = files.checkpoint()->manifest();
  runtime->reactor.block_on(prove_all(*files.checkpoint(), console));
  console.line(fmt::format("{}: every byte is intact ({} in {} files)", what,
                           format_bytes(files_bytes(manifest)), manifest.files.size()));
  say_resume(console, content);
  return 0;
}

int ckpt_diff(const CkptCommand& command) {
  Console console;
  const auto runtime = make_runtime();
  CheckpointFiles first(*runtime, command.paths.at(0));
  CheckpointFiles second(*runtime, command.paths.at(1));
  const auto ours = by_name(first.source().content());
  const auto theirs = by_name(second.source().content());
  std::size_t differing = 0;
  std::vector<std::string> lines;
  std::uint64_t done = 0;
  std::uint64_t total = 0;
  for (const StateTensor& tensor : first.source().content().tensors) total += tensor.size_bytes();
  for (const auto& [name, index] : ours) {
    const StateTensor& a = first.source().content().tensors[index];
    const auto found = theirs.find(name);
    std::string line;
    if (found == theirs.end()) {
      line = fmt::format("{}: only in {}", name, first.source().place());
    } else if (const StateTensor& b = second.source().content().tensors[found->second];
               a.shape != b.shape || a.type != b.type) {
      line = fmt::format("{}: {} [{}] and {} [{}]", name, to_string(a.type),
                         fmt::join(a.shape, ", "), to_string(b.type), fmt::join(b.shape, ", "));
    } else {
      const Difference its =
          runtime->reactor.block_on(compare(first.source(), second.source(), index, found->second));
      if (its.elements > 0)
        line = fmt::format("{}: {} of {} values differ", name, its.elements, a.count());
    }
    done += a.size_bytes();
    console.progress("comparing", done, total);
    if (line.empty()) continue;
    ++differing;
    lines.push_back(std::move(line));
  }
  for (const auto& [name, index] : theirs) {
    if (ours.contains(name)) continue;
    ++differing;
    lines.push_back(fmt::format("{}: only in {}", name, second.source().place()));
  }
  for (std::size_t i = 0; i < std::min(lines.size(), kNamesShown); ++i) console.line(lines[i]);
  if (lines.size() > kNamesShown)
    console.line(fmt::format(".. and {} more", lines.size() - kNamesShown));
  console.line(differing == 0 ? fmt::format("{} tensors have the same bits", ours.size())
                              : fmt::format("{} tensors differ", differing));
  return differing == 0 ? 0 : 1;
}

}  // namespace ziggurat::cli
