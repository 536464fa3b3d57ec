// SPDX-License-Identifier: Apache-2.0
// integrations/c/ziggurat.hpp: ziggurat.h for C++17: objects close themselves, and errors are
// thrown. Header only; ziggurat.h says what each call does. It has what most trainers call: all
// else is ziggurat::check(ziggurat_NAME(engine.handle(), ...)).
//
//   ziggurat::Runtime runtime("{\"threads\": 2}");
//   ziggurat::Engine engine(runtime, {{"weight", {768, 768}, ziggurat::memory_of(weight)}},
//                           "{\"store\": \"/nvme/run\"}");
//   engine.lend_gradient(0, ziggurat::memory_of(gradient));
//   engine.step({adamw});
//   engine.wait();
#ifndef ZIGGURAT_HPP
#define ZIGGURAT_HPP

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ziggurat.h"

namespace ziggurat {

class Error : public std::runtime_error {
 public:
  Error(ziggurat_status status, const char* words) : std::runtime_error(words), status_(status) {}
  ziggurat_status status() const noexcept { return status_; }

 private:
  ziggurat_status status_;
};

/// Throws the error of a call that failed.
inline void check(ziggurat_status status) {
  if (status != ZIGGURAT_OK) throw Error(status, ziggurat_last_error());
}

/// `count` elements of `dtype` at `address`.
inline ziggurat_memory memory_at(void* address, std::uint64_t count, ziggurat_dtype dtype) {
  auto memory = ZIGGURAT_INIT(ziggurat_memory);
  memory.dtype = dtype;
  memory.address = address;
  memory.size_bytes = count * (dtype == ZIGGURAT_FP32 ? 4 : 2);
  return memory;
}
/// Returns the memory of a vector, or of another container of floats in a row.
template <class Floats>
ziggurat_memory memory_of(Floats& floats) {
  static_assert(std::is_same_v<std::remove_reference_t<decltype(*floats.data())>, float>);
  return memory_at(floats.data(), floats.size(), ZIGGURAT_FP32);
}

class Runtime {
 public:
  explicit Runtime(const std::string& settings = "{}") {
    check(ziggurat_runtime_create(settings.c_str(), &handle_));
  }
  Runtime(Runtime&& other) noexcept : handle_(std::exchange(other.handle_, 0)) {}
  Runtime& operator=(Runtime&&) = delete;
  ~Runtime() {
    if (handle_ != 0) ziggurat_runtime_destroy(handle_);
  }
  ziggurat_runtime handle() const noexcept { return handle_; }

 private:
  ziggurat_runtime handle_ = 0;
};

/// Exchanges memory among ranks; the memory of a call belongs to the exchange until finish().
class Exchange {
 public:
  Exchange(const Runtime& runtime, const std::string& name) {
    check(ziggurat_exchange_open(runtime.handle(), name.c_str(), &handle_));
  }
  Exchange(Exchange&& other) noexcept : handle_(std::exchange(other.handle_, 0)) {}
  Exchange& operator=(Exchange&&) = delete;
  ~Exchange() {
    if (handle_ != 0) ziggurat_exchange_close(handle_);
  }
  ziggurat_exchange handle() const noexcept { return handle_; }

  std::uint64_t begin_all_to_all(const void* input, void* output, std::uint64_t slice_bytes) {
    std::uint64_t ticket = 0;
    check(ziggurat_begin_all_to_all(handle_, input, output, slice_bytes, &ticket));
    return ticket;
  }
  std::uint64_t begin_all_gather(const void* input, void* output, std::uint64_t input_bytes) {
    std::uint64_t ticket = 0;
    check(ziggurat_begin_all_gather(handle_, input, output, input_bytes, &ticket));
    return ticket;
  }
  void finish(std::uint64_t ticket) { check(ziggurat_finish(handle_, ticket)); }
  /// Replaces `values` by their sums over the ranks.
  void all_reduce(std::vector<double>& values) {
    std::uint64_t ticket = 0;
    check(ziggurat_begin_all_reduce_doubles(handle_, values.data(), values.size(), &ticket));
    finish(ticket);
  }
  void barrier() {
    std::uint64_t ticket = 0;
    check(ziggurat_begin_barrier(handle_, &ticket));
    finish(ticket);
  }

 private:
  ziggurat_exchange handle_ = 0;
};

struct Param {
  std::string name;
  std::vector<std::int64_t> shape;
  ziggurat_memory values;  ///< lent until the engine is closed; with a null address it is streamed
  std::uint32_t group = 0;
  std::uint32_t unit = 0;  ///< with which it is acquired, if it is streamed
  std::uint32_t flags = 0;
};

/// An open engine. Closing it loses what is not durable: call make_durable() before.
class Engine {
 public:
  Engine(const Runtime& runtime, const std::vector<Param>& params, const std::string& settings) {
    std::vector<ziggurat_param> all;
    for (const Param& param : params) {
      auto one = ZIGGURAT_INIT(ziggurat_param);
      one.group = param.group;
      one.name = param.name.c_str();
      one.shape = param.shape.data();
      one.dimensions = static_cast<std::uint32_t>(param.shape.size());
      one.unit = param.unit;
      one.flags = param.flags;
      one.values = param.values;
      all.push_back(one);
    }
    check(
        ziggurat_engine_open(runtime.handle(), all.data(), all.size(), settings.c_str(), &handle_));
  }
  Engine(Engine&& other) noexcept : handle_(std::exchange(other.handle_, 0)) {}
  Engine& operator=(Engine&&) = delete;
  ~Engine() {
    if (handle_ != 0) ziggurat_engine_close(handle_);
  }
  ziggurat_engine handle() const noexcept { return handle_; }

  void lend_gradient(std::uint64_t param, const ziggurat_memory& gradient, float scale = 1) {
    check(ziggurat_lend_gradient(handle_, param, &gradient, scale));
  }
  /// Lends many gradients in one call: gradient i is that of parameter params[i], and all have one
  /// type.
  void lend_gradients(const std::vector<std::uint64_t>& params, const std::vector<void*>& addresses,
                      ziggurat_dtype dtype, const std::vector<float>& scales = {}) {
    if (addresses.size() != params.size() || (!scales.empty() && scales.size() != params.size()))
      throw Error(ZIGGURAT_INVALID_ARGUMENT,
                  "lend_gradients: give an address for each parameter, and a scale for each or "
                  "for none");
    const std::vector<ziggurat_dtype> dtypes(params.size(), dtype);
    check(ziggurat_lend_gradients(handle_, params.size(), params.data(), addresses.data(),
                                  dtypes.data(), scales.empty() ? nullptr : scales.data()));
  }
  void add_gradient(std::uint64_t param, const ziggurat_memory& gradient, float scale = 1) {
    check(ziggurat_add_gradient(handle_, param, &gradient, scale));
  }
  void scale_gradient(std::uint64_t param, float scale) {
    check(ziggurat_scale_gradient(handle_, param, scale));
  }
  void discard_gradient(std::uint64_t param) { check(ziggurat_discard_gradient(handle_, param)); }
  void discard_gradients() { check(ziggurat_discard_gradients(handle_)); }
  double gradient_norm() {
    double norm = 0;
    check(ziggurat_gradient_norm(handle_, &norm));
    return norm;
  }
  void expect_gradients() { check(ziggurat_expect_gradients(handle_)); }
  void lend_param(std::uint64_t param, const ziggurat_memory& values) {
    check(ziggurat_lend_param(handle_, param, &values));
  }
  void param_written(std::uint64_t param) { check(ziggurat_param_written(handle_, param)); }

  /// Streamed parameters: acquire(unit), memory of its parameters, release(unit).
  void acquire(std::uint32_t unit, void* stream = nullptr) {
    check(ziggurat_acquire(handle_, unit, stream));
  }
  void acquire_aside(std::uint32_t unit, void* stream = nullptr) {
    check(ziggurat_acquire_aside(handle_, unit, stream));
  }
  void release(std::uint32_t unit, void* stream = nullptr) {
    check(ziggurat_release(handle_, unit, stream));
  }
  void expect_units(const std::vector<std::uint32_t>& units) {
    check(ziggurat_expect_units(handle_, units.data(), units.size()));
  }
  ziggurat_memory memory_of(std::uint64_t param) const {
    auto place = ZIGGURAT_INIT(ziggurat_memory);
    check(ziggurat_param_memory(handle_, param, &place));
    return place;
  }
  std::vector<void*> addresses_of(const std::vector<std::uint64_t>& params) const {
    std::vector<void*> addresses(params.size());
    check(ziggurat_param_addresses(handle_, params.size(), params.data(), addresses.data()));
    return addresses;
  }
  void read_param(std::uint64_t param, const ziggurat_memory& values) const {
    check(ziggurat_read_param(handle_, param, &values));
  }
  void write_param(std::uint64_t param, const ziggurat_memory& values) {
    check(ziggurat_write_param(handle_, param, &values));
  }
  /// Returns false, and reads nothing, if the parameter has no gradient.
  bool read_gradient(std::uint64_t param, const ziggurat_memory& values) const {
    std::int32_t has = 0;
    check(ziggurat_read_gradient(handle_, param, &values, &has));
    return has != 0;
  }

  /// Makes a step and returns its generation. `flags` are those of ziggurat_step_options.
  std::uint64_t step(const std::vector<ziggurat_group>& groups, float grad_scale = 1,
                     const std::string& blob = {}, std::uint32_t flags = 0) {
    auto options = ZIGGURAT_INIT(ziggurat_step_options);
    options.group_count = static_cast<std::uint32_t>(groups.size());
    options.groups = groups.data();
    options.grad_scale = grad_scale;
    options.flags = flags;
    options.blob = blob.data();
    options.blob_bytes = blob.size();
    auto result = ZIGGURAT_INIT(ziggurat_step_result);
    check(ziggurat_step(handle_, &options, &result));
    return result.generation;
  }
  void wait(std::uint64_t param = ZIGGURAT_ALL_PARAMS) { check(ziggurat_wait(handle_, param)); }
  void give_blob(const std::string& blob) {
    check(ziggurat_give_blob(handle_, blob.data(), blob.size()));
  }
  void make_durable() { check(ziggurat_make_durable(handle_)); }

  ziggurat_state state() const {
    auto state = ZIGGURAT_INIT(ziggurat_state);
    check(ziggurat_engine_state(handle_, &state));
    return state;
  }
  std::uint64_t steps_of(std::uint64_t param) const {
    std::uint64_t steps = 0;
    check(ziggurat_param_steps(handle_, param, &steps));
    return steps;
  }
  /// Returns the blob of the generation at which open resumed.
  std::string blob() const {
    std::string bytes(state().blob_bytes, '\0');
    check(ziggurat_read_blob(handle_, bytes.data(), bytes.size()));
    return bytes;
  }
  /// Lists what another rank has, in the lines of ziggurat_pieces_of(); read_state_of() reads its
  /// state.
  std::string pieces_of(std::int32_t rank) const {
    return text_of([rank](ziggurat_engine engine, char* text, std::uint64_t capacity_bytes,
                          std::uint64_t* needed_bytes) {
      return ziggurat_pieces_of(engine, rank, text, capacity_bytes, needed_bytes);
    });
  }
  void read_state_of(std::int32_t rank, const std::string& param, const std::string& name,
                     const ziggurat_memory& values) const {
    check(ziggurat_read_state_of(handle_, rank, param.c_str(), name.c_str(), &values));
  }
  std::string describe() const { return text_of(ziggurat_describe); }
  std::string figures() const { return text_of(ziggurat_figures); }

 private:
  template <class Call>
  std::string text_of(Call call) const {
    std::uint64_t needed = 0;
    check(call(handle_, nullptr, 0, &needed));
    std::string text(needed, '\0');
    check(call(handle_, text.data(), text.size(), nullptr));
    text.resize(text.find('\0'));
    return text;
  }

  ziggurat_engine handle_ = 0;
};

}  // namespace ziggurat

#endif  // ZIGGURAT_HPP
