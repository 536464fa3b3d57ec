// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/onednn.cc: finds oneDNN at run time, and passes each call on to it. A function
// of oneDNN that is not listed here does not link.
#include "integrations/gpt/onednn.h"

#include <fmt/format.h>
#include <oneapi/dnnl/dnnl.h>

#include "collectives/shared_library.h"

namespace ziggurat::gpt {
namespace {

SharedLibrary open_onednn() {
  return SharedLibrary::open(
      own_library_names(fmt::format("libdnnl.so.{}", DNNL_VERSION_MAJOR)),
      fmt::format(
          "install oneDNN {} for CPUs, with which `ziggurat train` multiplies matrices (Debian: "
          "libdnnl{})",
          DNNL_VERSION_MAJOR, DNNL_VERSION_MAJOR));
}

const SharedLibrary& onednn() {
  // Clang 16 would destroy temporaries of an initializer in each call, if they stood here.
  static const SharedLibrary library = open_onednn();
  return library;
}

}  // namespace

// The loader also looks into the libraries that oneDNN has brought, so the OpenMP is its own.
int openmp_threads_max() {
  static auto* const function = onednn().function<int (*)()>("omp_get_max_threads");
  return function();
}

void limit_openmp_threads(int count) {
  static auto* const function = onednn().function<void (*)(int)>("omp_set_num_threads");
  function(count);
}

}  // namespace ziggurat::gpt

#define ZIGGURAT_ONEDNN(name)                                                                 \
  [] {                                                                                        \
    static auto* const function = ziggurat::gpt::onednn().function<decltype(&::name)>(#name); \
    return function;                                                                          \
  }()

extern "C" {

dnnl_cpu_isa_t dnnl_get_effective_cpu_isa() {
  return ZIGGURAT_ONEDNN(dnnl_get_effective_cpu_isa)();
}

const dnnl_version_t* dnnl_version() { return ZIGGURAT_ONEDNN(dnnl_version)(); }

dnnl_status_t dnnl_engine_create(dnnl_engine_t* engine, dnnl_engine_kind_t kind, size_t index) {
  return ZIGGURAT_ONEDNN(dnnl_engine_create)(engine, kind, index);
}

dnnl_status_t dnnl_engine_destroy(dnnl_engine_t engine) {
  return ZIGGURAT_ONEDNN(dnnl_engine_destroy)(engine);
}

dnnl_status_t dnnl_stream_create(dnnl_stream_t* stream, dnnl_engine_t engine, unsigned flags) {
  return ZIGGURAT_ONEDNN(dnnl_stream_create)(stream, engine, flags);
}

dnnl_status_t dnnl_stream_destroy(dnnl_stream_t stream) {
  return ZIGGURAT_ONEDNN(dnnl_stream_destroy)(stream);
}

size_t dnnl_memory_desc_get_size(const dnnl_memory_desc_t* description) {
  return ZIGGURAT_ONEDNN(dnnl_memory_desc_get_size)(description);
}

dnnl_status_t dnnl_memory_desc_init_by_strides(dnnl_memory_desc_t* description, int dimensions,
                                               const dnnl_dims_t sizes, dnnl_data_type_t type,
                                               const dnnl_dims_t strides) {
  return ZIGGURAT_ONEDNN(dnnl_memory_desc_init_by_strides)(description, dimensions, sizes, type,
                                                           strides);
}

dnnl_status_t dnnl_memory_create(dnnl_memory_t* memory, const dnnl_memory_desc_t* description,
                                 dnnl_engine_t engine, void* address) {
  return ZIGGURAT_ONEDNN(dnnl_memory_create)(memory, description, engine, address);
}

dnnl_status_t dnnl_memory_set_data_handle_v2(dnnl_memory_t memory, void* address,
                                             dnnl_stream_t stream) {
  return ZIGGURAT_ONEDNN(dnnl_memory_set_data_handle_v2)(memory, address, stream);
}

dnnl_status_t dnnl_memory_destroy(dnnl_memory_t memory) {
  return ZIGGURAT_ONEDNN(dnnl_memory_destroy)(memory);
}

dnnl_status_t dnnl_post_ops_create(dnnl_post_ops_t* operations) {
  return ZIGGURAT_ONEDNN(dnnl_post_ops_create)(operations);
}

dnnl_status_t dnnl_post_ops_append_sum(dnnl_post_ops_t operations, float scale) {
  return ZIGGURAT_ONEDNN(dnnl_post_ops_append_sum)(operations, scale);
}

dnnl_status_t dnnl_post_ops_append_sum_v2(dnnl_post_ops_t operations, float scale,
                                          dnnl_data_type_t type) {
  return ZIGGURAT_ONEDNN(dnnl_post_ops_append_sum_v2)(operations, scale, type);
}

dnnl_status_t dnnl_post_ops_destroy(dnnl_post_ops_t operations) {
  return ZIGGURAT_ONEDNN(dnnl_post_ops_destroy)(operations);
}

dnnl_status_t dnnl_primitive_attr_create(dnnl_primitive_attr_t* attributes) {
  return ZIGGURAT_ONEDNN(dnnl_primitive_attr_create)(attributes);
}

dnnl_status_t dnnl_primitive_attr_set_post_ops(dnnl_primitive_attr_t attributes,
                                               const_dnnl_post_ops_t operations) {
  return ZIGGURAT_ONEDNN(dnnl_primitive_attr_set_post_ops)(attributes, operations);
}

dnnl_status_t dnnl_primitive_attr_set_scratchpad_mode(dnnl_primitive_attr_t attributes,
                                                      dnnl_scratchpad_mode_t mode) {
  return ZIGGURAT_ONEDNN(dnnl_primitive_attr_set_scratchpad_mode)(attributes, mode);
}

dnnl_status_t dnnl_primitive_attr_destroy(dnnl_primitive_attr_t attributes) {
  return ZIGGURAT_ONEDNN(dnnl_primitive_attr_destroy)(attributes);
}

dnnl_status_t dnnl_matmul_desc_init(dnnl_matmul_desc_t* product, const dnnl_memory_desc_t* a,
                                    const dnnl_memory_desc_t* b, const dnnl_memory_desc_t* bias,
                                    const dnnl_memory_desc_t* c) {
  return ZIGGURAT_ONEDNN(dnnl_matmul_desc_init)(product, a, b, bias, c);
}

dnnl_status_t dnnl_primitive_desc_iterator_create(dnnl_primitive_desc_iterator_t* iterator,
                                                  const_dnnl_op_desc_t operation,
                                                  const_dnnl_primitive_attr_t attributes,
                                                  dnnl_engine_t engine,
                                                  const_dnnl_primitive_desc_t hint) {
  return ZIGGURAT_ONEDNN(dnnl_primitive_desc_iterator_create)(iterator, operation, attributes,
                                                              engine, hint);
}

dnnl_primitive_desc_t dnnl_primitive_desc_iterator_fetch(
    const_dnnl_primitive_desc_iterator_t iterator) {
  return ZIGGURAT_ONEDNN(dnnl_primitive_desc_iterator_fetch)(iterator);
}

dnnl_status_t dnnl_primitive_desc_iterator_destroy(dnnl_primitive_desc_iterator_t iterator) {
  return ZIGGURAT_ONEDNN(dnnl_primitive_desc_iterator_destroy)(iterator);
}

const dnnl_memory_desc_t* dnnl_primitive_desc_query_md(const_dnnl_primitive_desc_t description,
                                                       dnnl_query_t what, int index) {
  return ZIGGURAT_ONEDNN(dnnl_primitive_desc_query_md)(description, what, index);
}

dnnl_status_t dnnl_primitive_desc_destroy(dnnl_primitive_desc_t description) {
  return ZIGGURAT_ONEDNN(dnnl_primitive_desc_destroy)(description);
}

dnnl_status_t dnnl_primitive_create(dnnl_primitive_t* primitive,
                                    const_dnnl_primitive_desc_t description) {
  return ZIGGURAT_ONEDNN(dnnl_primitive_create)(primitive, description);
}

dnnl_status_t dnnl_primitive_execute(const_dnnl_primitive_t primitive, dnnl_stream_t stream,
                                     int count, const dnnl_exec_arg_t* arguments) {
  return ZIGGURAT_ONEDNN(dnnl_primitive_execute)(primitive, stream, count, arguments);
}

dnnl_status_t dnnl_primitive_destroy(dnnl_primitive_t primitive) {
  return ZIGGURAT_ONEDNN(dnnl_primitive_destroy)(primitive);
}

}  // extern "C"
