// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/matmul.cc: the matrix products, by oneDNN.
//
// Debian's oneDNN 2.6.3 packs operands in a buffer that it allocates itself (tile operands in
// fp32-sized blocks, some hundred KiB per worker). The buffer is outside the device budget, but
// inside the process allowance.
#include "integrations/gpt/matmul.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <oneapi/dnnl/dnnl.hpp>

#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "integrations/gpt/kernels.h"
#include "integrations/gpt/onednn.h"

namespace ziggurat::gpt {
namespace {

using Memory = dnnl::memory;

// OpenMP's limit is per thread. Workers keep a limit of one for ever; the trainer's thread belongs
// to the embedder, so OneOpenMpThread restores its limit.
void limit_this_worker_to_one_thread() {
  thread_local const bool done = [] {
    limit_openmp_threads(1);
    return true;
  }();
  static_cast<void>(done);
}

class OneOpenMpThread {
 public:
  OneOpenMpThread() : before_(openmp_threads_max()) { limit_openmp_threads(1); }
  ~OneOpenMpThread() { limit_openmp_threads(before_); }
  OneOpenMpThread(const OneOpenMpThread&) = delete;
  OneOpenMpThread& operator=(const OneOpenMpThread&) = delete;

 private:
  int before_;
};

const dnnl::engine& cpu_engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

Memory::desc describe(std::int64_t rows, std::int64_t columns, const Layout& layout,
                      Memory::data_type type) {
  const Memory::dims strides =
      layout.transposed ? Memory::dims{1, layout.leading} : Memory::dims{layout.leading, 1};
  return {{rows, columns}, type, strides};
}

// Returns the layout of a widened operand: dense, with the same stored rows.
Layout dense(std::int64_t rows, std::int64_t columns, const Layout& layout) {
  return {layout.transposed ? rows : columns, layout.transposed};
}

dnnl::matmul::primitive_desc make_descriptor(const MatmulShape& shape, bool wide) {
  const auto type =
      wide || shape.dtype == DType::kFloat32 ? Memory::data_type::f32 : Memory::data_type::bf16;
  const auto a =
      describe(shape.m, shape.k, wide ? dense(shape.m, shape.k, shape.a) : shape.a, type);
  const auto b =
      describe(shape.k, shape.n, wide ? dense(shape.k, shape.n, shape.b) : shape.b, type);
  const auto c = describe(shape.m, shape.n, {shape.leading_c, false}, Memory::data_type::f32);
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (shape.add) {
    dnnl::post_ops sum;
    sum.append_sum(1.0F);
    attributes.set_post_ops(sum);
  }
  return {{a, b, c}, attributes, cpu_engine()};
}

const char* isa_name(dnnl::cpu_isa isa) {
  switch (isa) {
    case dnnl::cpu_isa::sse41: return "sse41";
    case dnnl::cpu_isa::avx: return "avx";
    case dnnl::cpu_isa::avx2: return "avx2";
    case dnnl::cpu_isa::avx2_vnni: return "avx2_vnni";
    case dnnl::cpu_isa::avx512_mic: return "avx512_mic";
    case dnnl::cpu_isa::avx512_mic_4ops: return "avx512_mic_4ops";
    case dnnl::cpu_isa::avx512_core: return "avx512_core";
    case dnnl::cpu_isa::avx512_core_vnni: return "avx512_core_vnni";
    case dnnl::cpu_isa::avx512_core_bf16: return "avx512_core_bf16";
    case dnnl::cpu_isa::avx512_core_amx: return "avx512_core_amx";
    default: return "generic";
  }
}

// A CPU with AVX-512 but without bf16 instructions can build bf16 products too, at a third of
// fp32's speed, so fp32 is used there.
bool find_bf16_products() {
  const OneOpenMpThread one;
  const dnnl::cpu_isa isa = dnnl::get_effective_cpu_isa();
  bool found = isa == dnnl::cpu_isa::avx512_core_bf16 || isa == dnnl::cpu_isa::avx512_core_amx;
#if !defined(__x86_64__)
  found = true;  // oneDNN has no ISA names there, so what builds is used
#endif
  if (found) {
    try {
      make_descriptor({.m = 64,
                       .k = 64,
                       .n = 64,
                       .a = {64, false},
                       .b = {64, false},
                       .leading_c = 64,
                       .add = true},
                      false);
    } catch (const dnnl::error&) {
      found = false;
    }
  }
  if (!found) {
    note_degraded("matmul", fmt::format("the CPU has no bf16 dot product ({}): operands are "
                                        "widened to fp32, which is about twice as slow",
                                        isa_name(isa)));
  }
  return found;
}

// How many rows an operand has as it is stored, and how many elements each of them.
struct Stored {
  std::int64_t rows, columns;
};
Stored stored(std::int64_t rows, std::int64_t columns, const Layout& layout) {
  return layout.transposed ? Stored{columns, rows} : Stored{rows, columns};
}

/// Returns whether operands are widened to fp32. fp16 always is, because few CPUs can multiply it,
/// and their products would have other bits.
bool is_widened(DType dtype) {
  return dtype == DType::kFloat16 || (dtype == DType::kBFloat16 && !has_bf16_products());
}

void widen_operand(ConstArray from, const Stored& size, std::int64_t leading, std::span<float> to) {
  ZIGGURAT_CHECK(static_cast<std::int64_t>(to.size()) >= size.rows * size.columns,
                 "scratch for a widened operand");
  for (std::int64_t row = 0; row < size.rows; ++row) {
    kernels::widen(from + row * leading, size.columns, to.data() + row * size.columns);
  }
}

// The tiles of products that go through a tile buffer are 512 x 192 or 512 x 128. Measured on Zen
// 5, one core, 512 rows, GPT-2 small's shapes, best of 6 in CPU time: 408-439 GF/s at K = 768, and
// 388-423 at K = 3072 (128 columns). The whole matrix in one call gives 400-445, and tiles of half
// the rows give 10-30 less.
constexpr std::int64_t kTileRows = 512;
constexpr std::int64_t kTileColumns = 192;
constexpr std::int64_t kTileMultiplyAdds = std::int64_t{1} << 28;  // at most 1.3 ms at those speeds

struct TileSize {
  std::int64_t rows, columns;
};

// Chooses a tile. Columns that divide the matrix leave no narrow tile at its edge; the rows are
// halved until a tile takes little enough time.
TileSize tile_size(const MatmulShape& shape) {
  TileSize tile{kTileRows, kTileColumns};
  if (shape.whole_rows) {
    tile = {kTileRows * kTileColumns / shape.n, shape.n};
  } else if (shape.add) {
    // A weight gradient is written directly to its place. Wide and low tiles reuse its transposed
    // left operand, whose packing is the slow part (256 x 768: 385-424 GF/s; 256 x 384: 364-416;
    // 768 x 256: 337-399).
    tile = {256, 256};
    for (const std::int64_t columns : {768, 512, 384}) {
      if (shape.n % columns == 0) {
        tile.columns = columns;
        break;
      }
    }
  } else {
    const bool long_tile = tile.rows * tile.columns * shape.k > kTileMultiplyAdds;
    if (shape.n % 128 == 0 && (long_tile || shape.n % kTileColumns != 0)) tile.columns = 128;
  }
  // Widened operands take scratch memory: 128 rows of K = 3072 are 1.5 MiB per worker.
  if (is_widened(shape.dtype)) tile.rows = std::min<std::int64_t>(tile.rows, 128);
  while (tile.rows > 64 && tile.rows * tile.columns * shape.k > kTileMultiplyAdds) tile.rows /= 2;
  return {std::min(tile.rows, shape.m), std::min(tile.columns, shape.n)};
}

}  // namespace

struct Matmul::Impl {
  // Each worker has one set of oneDNN's memory objects, made once, which wrap the pointers.
  struct Handles {
    Memory a, b, c, scratch;
    std::array<dnnl_exec_arg_t, 4> args;
  };

  MatmulShape shape;
  bool wide = false;
  dnnl::matmul primitive;
  mutable std::vector<Handles> handles;
  mutable std::vector<std::vector<std::byte>> scratch;  // 64 bytes each for these products
  std::vector<dnnl::stream> streams;
};

Matmul::Matmul(const MatmulShape& shape, std::size_t workers) : impl_(std::make_unique<Impl>()) {
  const OneOpenMpThread one;
  impl_->shape = shape;
  impl_->wide = is_widened(shape.dtype);
  try {
    const auto descriptor = make_descriptor(shape, impl_->wide);
    impl_->primitive = dnnl::matmul(descriptor);
    impl_->handles.resize(workers);
    impl_->scratch.resize(workers);
    for (std::size_t i = 0; i < workers; ++i) {
      Impl::Handles& h = impl_->handles[i];
      impl_->streams.emplace_back(cpu_engine());
      impl_->scratch[i].resize(descriptor.scratchpad_desc().get_size());
      h.a = Memory(descriptor.src_desc(), cpu_engine(), nullptr);
      h.b = Memory(descriptor.weights_desc(), cpu_engine(), nullptr);
      h.c = Memory(descriptor.dst_desc(), cpu_engine(), nullptr);
      h.scratch = Memory(descriptor.scratchpad_desc(), cpu_engine(), impl_->scratch[i].data());
      h.args = {{{DNNL_ARG_SRC, h.a.get()},
                 {DNNL_ARG_WEIGHTS, h.b.get()},
                 {DNNL_ARG_DST, h.c.get()},
                 {DNNL_ARG_SCRATCHPAD, h.scratch.get()}}};
    }
  } catch (const dnnl::error& error) {
    throw Error(ErrorCode::kUnimplemented,
                fmt::format("oneDNN cannot build the product {} x {} x {} ({}): {}", shape.m,
                            shape.k, shape.n, matmul_fingerprint(), error.message),
                static_cast<int>(error.status));
  }
}

Matmul::~Matmul() = default;
Matmul::Matmul(Matmul&&) noexcept = default;
Matmul& Matmul::operator=(Matmul&&) noexcept = default;

void Matmul::execute(std::size_t worker, ConstArray a, ConstArray b, float* c,
                     const WideScratch& wide) const {
  limit_this_worker_to_one_thread();
  const MatmulShape& s = impl_->shape;
  Impl::Handles& h = impl_->handles[worker];
  if (impl_->wide) {
    widen_operand(a, stored(s.m, s.k, s.a), s.a.leading, wide.a);
    widen_operand(b, stored(s.k, s.n, s.b), s.b.leading, wide.b);
    h.a.set_data_handle(wide.a.data());
    h.b.set_data_handle(wide.b.data());
  } else {
    h.a.set_data_handle(const_cast<std::byte*>(a.data));
    h.b.set_data_handle(const_cast<std::byte*>(b.data));
  }
  h.c.set_data_handle(c);
  const dnnl_status_t status =
      dnnl_primitive_execute(impl_->primitive.get(), impl_->streams[worker].get(),
                             static_cast<int>(h.args.size()), h.args.data());
  ZIGGURAT_CHECK(status == dnnl_success, "oneDNN failed in a product it had built");
}

TiledMatmul::TiledMatmul(const MatmulShape& shape, std::size_t workers) : shape_(shape) {
  const TileSize size = tile_size(shape);
  std::vector<TileSize> sizes;
  for (std::int64_t column = 0; column < shape.n; column += size.columns) {
    for (std::int64_t row = 0; row < shape.m; row += size.rows) {
      const Tile tile{row, column, std::min(size.rows, shape.m - row),
                      std::min(size.columns, shape.n - column)};
      const auto same = [&](const TileSize& s) {
        return s.rows == tile.rows && s.columns == tile.columns;
      };
      auto found = std::find_if(sizes.begin(), sizes.end(), same);
      if (found == sizes.end()) {
        MatmulShape part = shape;
        part.m = tile.rows;
        part.n = tile.columns;
        if (!shape.add) part.leading_c = tile.columns;
        kernels_.emplace_back(part, workers);
        sizes.push_back({tile.rows, tile.columns});
        found = sizes.end() - 1;
      }
      kernel_of_tile_.push_back(static_cast<std::size_t>(found - sizes.begin()));
      tiles_.push_back(tile);
    }
  }
}

std::int64_t TiledMatmul::tile_elements_max() noexcept { return kTileRows * kTileColumns; }

void TiledMatmul::run(std::size_t index, std::size_t worker, ConstArray a, ConstArray b, float* c,
                      const WideScratch& wide) const {
  const Tile& t = tiles_[index];
  const ConstArray a_tile = a + (shape_.a.transposed ? t.row : t.row * shape_.a.leading);
  const ConstArray b_tile = b + (shape_.b.transposed ? t.column * shape_.b.leading : t.column);
  kernels_[kernel_of_tile_[index]].execute(worker, a_tile, b_tile, c, wide);
}

void TiledMatmul::compute(std::size_t index, std::size_t worker, ConstArray a, ConstArray b,
                          float* c, const WideScratch& wide) const {
  ZIGGURAT_CHECK(!shape_.add, "this product adds into its matrix");
  run(index, worker, a, b, c, wide);
}

void TiledMatmul::accumulate(std::size_t index, std::size_t worker, ConstArray a, ConstArray b,
                             float* c, const WideScratch& wide) const {
  ZIGGURAT_CHECK(shape_.add, "this product goes to a tile buffer");
  run(index, worker, a, b, c + tiles_[index].row * shape_.leading_c + tiles_[index].column, wide);
}

WideElements wide_elements(const MatmulShape& shape) {
  if (!is_widened(shape.dtype)) return {};
  return {shape.m * shape.k, shape.k * shape.n};
}

WideElements wide_elements_tiled(const MatmulShape& shape) {
  MatmulShape tile = shape;
  const TileSize size = tile_size(shape);
  tile.m = size.rows;
  tile.n = size.columns;
  return wide_elements(tile);
}

bool has_bf16_products() {
  static const bool found = find_bf16_products();
  return found;
}

std::string matmul_fingerprint() {
  const dnnl_version_t* version = dnnl_version();
  return fmt::format("oneDNN {}.{}.{} {}, bf16 dot: {}", version->major, version->minor,
                     version->patch, isa_name(dnnl::get_effective_cpu_isa()),
                     has_bf16_products() ? "yes" : "no");
}

}  // namespace ziggurat::gpt
