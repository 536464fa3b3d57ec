// SPDX-License-Identifier: Apache-2.0
// integrations/c/embedded_checkpoint.cc: reads values of a checkpoint into the embedder's memory.
#include "integrations/c/embedded_checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "aio/aligned_bytes.h"
#include "aio/blocking_calls.h"
#include "base/error.h"
#include "base/log.h"
#include "collectives/self_communicator.h"
#include "core/checkpoint/tensor_values.h"
#include "integrations/c/wrong.h"
#include "optimizer/state_arrays.h"
#include "tiers/store/quorum.h"

namespace ziggurat {
namespace {

/// Most elements that are read at once.
constexpr std::uint64_t kReadAtOnce = std::uint64_t{1} << 20;

}  // namespace

EmbeddedCheckpoint::EmbeddedCheckpoint(Runtime& runtime, const std::string& path)
    : runtime_(runtime) {
  if (!std::filesystem::is_directory(path))
    throw wrong(
        fmt::format("the directory {} does not exist, so there is no checkpoint in it", path));
  runtime.reactor.block_on([](EmbeddedCheckpoint& self, const std::string& from) -> Task<> {
    std::exception_ptr error;
    try {
      self.io_ = self.runtime_.io_engine(self.runtime_.reactor, from);
      Task<std::string> finding =
          find_checkpoint({.reactor = self.runtime_.reactor, .io = *self.io_}, from);
      std::string found = co_await std::move(finding);
      Task<std::unique_ptr<CheckpointReader>> opening = CheckpointReader::open(
          {self.runtime_.reactor, *self.runtime_.workers, *self.io_}, std::move(found));
      self.reader_ = co_await std::move(opening);
      Task<bool> looking = ziggurat::is_newest_of_line(
          {.reactor = self.runtime_.reactor, .io = *self.io_}, self.reader_->place());
      self.is_newest_of_line_ = co_await std::move(looking);
    } catch (...) {
      error = std::current_exception();
    }
    if (!error) co_return;
    self.io_.reset();
    std::rethrow_exception(error);
  }(*this, path));
}

EmbeddedCheckpoint::~EmbeddedCheckpoint() {
  runtime_.reactor.block_on([](EmbeddedCheckpoint& self) -> Task<> {
    self.reader_.reset();
    self.io_.reset();
    co_return;
  }(*this));
}

std::string EmbeddedCheckpoint::description() const {
  using nlohmann::json;
  const StateContent& its = reader_->content();
  json tensors = json::array();
  for (const StateTensor& tensor : its.tensors)
    tensors.push_back(
        {tensor.name, tensor.owner, tensor.array, to_string(tensor.type), tensor.shape});
  json resume = json::object();
  for (const auto& [name, text] : its.resume) resume[name] = json::parse(text);
  json all{{"directory", reader_->place()}, {"step", its.step},     {"model", its.model},
           {"dtype", to_string(its.dtype)}, {"optimizer", nullptr}, {"resume", resume},
           {"blob_bytes", its.blob.size()}, {"tensors", tensors}};
  if (its.state) {
    all["optimizer"] = to_string(its.state->optimizer);
    all["state_format"] = to_string(its.state->format);
  }
  return all.dump();
}

void EmbeddedCheckpoint::read(std::size_t tensor, std::uint64_t first,
                              TypedSpan<std::byte> values) {
  const std::vector<StateTensor>& tensors = reader_->content().tensors;
  if (tensor >= tensors.size())
    throw wrong(fmt::format("there is no tensor {}, because {} has only {} tensors", tensor,
                            reader_->place(), tensors.size()));
  const StateTensor& its = tensors[tensor];
  if (first > its.count() || values.count() > its.count() - first) {
    throw wrong(fmt::format("elements {} to {} of '{}' were asked for, but the tensor has only {}",
                            first, first + values.count(), its.name, its.count()));
  }
  const bool same = dtype_of(its.type) == values.dtype;
  if (its.type == TensorType::kU8 || (!same && values.dtype != DType::kFloat32)) {
    throw wrong(
        fmt::format("'{}' has the type {}: read it in that type, or in fp32 unless it holds codes",
                    its.name, to_string(its.type)));
  }
  runtime_.reactor.block_on([](CheckpointReader& reader, std::size_t index, const StateTensor& of,
                               std::uint64_t from, TypedSpan<std::byte> into,
                               bool as_it_is) -> Task<> {
    AlignedPool memory;
    for (std::uint64_t at = 0; at < into.count(); at += kReadAtOnce) {
      const std::uint64_t count = std::min(kReadAtOnce, into.count() - at);
      const TensorRun run{.first = from + at, .count = count, .at = 0};
      const TypedSpan<std::byte> next = into.subspan(at, count);
      if (as_it_is) {
        co_await reader.read(index, std::span(&run, 1), next.bytes);
        continue;
      }
      const AlignedBytes bytes = memory.take(count * size_bytes(of.type));
      co_await reader.read(index, std::span(&run, 1), bytes.span());
      widen(of.type, bytes.span(), next.as<float>());
    }
  }(*reader_, tensor, its, first, values, same));
}

}  // namespace ziggurat
