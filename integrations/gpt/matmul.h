// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/matmul.h: matrix products by oneDNN, single-threaded, one tile at a time.
//
// oneDNN would use OpenMP threads, and these change the bits of some products. So a worker calls it
// for one tile, with an OpenMP limit of one thread, and the grid of tiles depends on the shape
// alone. The reduction is never split over tiles. Products are fp32; the caller's epilogue rounds
// them, by the rules in base/dtype.h and base/numerics/float16.h. fp16 operands, and bf16 operands
// on a CPU without a bf16 dot product, are widened to fp32 per tile, which is exact.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "integrations/gpt/array.h"

namespace ziggurat::gpt {

/// How a matrix lies in memory: stored rows begin `leading` elements apart. If `transposed`, the
/// stored rows are the matrix's columns.
struct Layout {
  std::int64_t leading = 0;
  bool transposed = false;
};

/// The product C[m,n] (fp32, `leading_c`) = A[m,k] B[k,n] (`dtype`), to which `add` adds the old C.
struct MatmulShape {
  std::int64_t m = 0, k = 0, n = 0;
  Layout a, b;
  std::int64_t leading_c = 0;
  bool add = false;
  bool whole_rows = false;  ///< makes TiledMatmul cut no columns
  DType dtype = DType::kBFloat16;
};

/// The fp32 scratch that one worker needs to run a product; empty if nothing is widened.
struct WideScratch {
  std::span<float> a, b;
};

/// One product of a fixed shape. All workers may call execute() at once, each with its own index.
class Matmul {
 public:
  /// `workers` is the number of indices that execute() gets.
  Matmul(const MatmulShape& shape, std::size_t workers);
  ~Matmul();
  Matmul(Matmul&&) noexcept;
  Matmul& operator=(Matmul&&) noexcept;

  void execute(std::size_t worker, ConstArray a, ConstArray b, float* c,
               const WideScratch& wide) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A product cut into tiles that take at most about a millisecond, the same tiles for any number of
/// workers.
class TiledMatmul {
 public:
  struct Tile {
    std::int64_t row, column, rows, columns;
  };

  TiledMatmul(const MatmulShape& shape, std::size_t workers);

  std::size_t tile_count() const noexcept { return tiles_.size(); }
  const Tile& tile(std::size_t index) const noexcept { return tiles_[index]; }
  /// Returns the elements of the largest tile, which `c` of compute() must hold.
  static std::int64_t tile_elements_max() noexcept;

  /// Computes a tile's product into `c`, dense (rows x columns). For shapes without `add`.
  void compute(std::size_t index, std::size_t worker, ConstArray a, ConstArray b, float* c,
               const WideScratch& wide) const;
  /// Adds the tile's product to its place in the whole matrix `c`. For shapes with `add`.
  void accumulate(std::size_t index, std::size_t worker, ConstArray a, ConstArray b, float* c,
                  const WideScratch& wide) const;

 private:
  void run(std::size_t index, std::size_t worker, ConstArray a, ConstArray b, float* c,
           const WideScratch& wide) const;

  MatmulShape shape_;
  std::vector<Tile> tiles_;
  std::vector<std::size_t> kernel_of_tile_;
  std::vector<Matmul> kernels_;  ///< whole tiles, and those cut by the right and lower edges
};

/// The elements of WideScratch that any tile of `shape` needs; 0 if nothing is widened.
struct WideElements {
  std::int64_t a = 0, b = 0;
};
WideElements wide_elements(const MatmulShape& shape);
WideElements wide_elements_tiled(const MatmulShape& shape);

/// Returns whether this CPU, as oneDNN may use it (ONEDNN_MAX_CPU_ISA), multiplies bf16. Found
/// once.
bool has_bf16_products();
/// Returns a text like "oneDNN 2.6.3 avx512_core_bf16, bf16 dot: yes".
std::string matmul_fingerprint();

}  // namespace ziggurat::gpt
