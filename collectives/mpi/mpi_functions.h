// SPDX-License-Identifier: Apache-2.0
// collectives/mpi/mpi_functions.h: what this project asks of an MPI, as libziggurat_mpi.so gives
// it.
//
// MPIs differ in binary form (Open MPI's handles are addresses, MPICH's are numbers), so only
// mpi_shim.cc sees <mpi.h>. It is a library of its own that is opened when a job asks for MPI: the
// program itself needs none, and one program serves another MPI by this small library alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ziggurat {

/// An MPI_Request, or an MPI_Message, in whatever form.
struct MpiHandle {
  alignas(8) unsigned char bytes[8];
};

struct MpiArrival {
  int from = 0;
  int size_bytes = 0;
  MpiHandle message{};  ///< for receive()
};

/// All return 0 or MPI's error, and are called by one thread, that of begin(). Nothing blocks but
/// begin() and end().
struct MpiFunctions {
  static constexpr std::uint32_t kVersion = 1;

  std::uint32_t version;
  /// `library` gets its name for itself, cut to its size.
  int (*begin)(int* rank, int* world_size, char* library, std::size_t library_bytes);
  int (*end)();
  int (*send)(const void* bytes, int size_bytes, int to, int tag, MpiHandle* request);
  /// Whether a message of `tag` is there, from whoever; it is then this caller's to receive.
  int (*probe)(int tag, int* found, MpiArrival* arrival);
  int (*receive)(void* bytes, int size_bytes, MpiHandle* message, MpiHandle* request);
  /// `size_bytes` of every rank to every rank.
  int (*gather)(const void* input, int size_bytes, void* output, MpiHandle* request);
  int (*test)(MpiHandle* request, int* done);
  void (*error_text)(int error, char* text, std::size_t text_bytes);
};

/// The one symbol of the library.
inline constexpr const char* kMpiFunctionsSymbol = "ziggurat_mpi_functions";
using GetMpiFunctions = const MpiFunctions* (*)();

}  // namespace ziggurat
