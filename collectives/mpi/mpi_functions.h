// SPDX-License-Identifier: Apache-2.0
// collectives/mpi/mpi_functions.h: the functions of an MPI that this project uses, as
// libziggurat_mpi.so provides them.
//
// MPIs differ in binary form (Open MPI's handles are addresses, MPICH's are numbers), so only
// mpi_shim.cc includes <mpi.h>. It is a separate library that is opened when a job asks for MPI. So
// the program itself needs no MPI, and only this small library must be built again for another MPI.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ziggurat {

/// An MPI_Request or an MPI_Message, in whatever form the MPI has.
struct MpiHandle {
  alignas(8) unsigned char bytes[8];
};

struct MpiArrival {
  int from = 0;
  int size_bytes = 0;
  MpiHandle message{};  ///< for receive()
};

/// The functions. All return 0 or MPI's error, and one thread calls them all, the one that called
/// begin(). Only begin() and end() block.
struct MpiFunctions {
  static constexpr std::uint32_t kVersion = 1;

  std::uint32_t version;
  /// Starts MPI. `library` receives MPI's name for itself, cut to the given size.
  int (*begin)(int* rank, int* world_size, char* library, std::size_t library_bytes);
  int (*end)();
  int (*send)(const void* bytes, int size_bytes, int to, int tag, MpiHandle* request);
  /// Looks for a message of `tag` from any rank. A message that is found can be received only by
  /// this caller.
  int (*probe)(int tag, int* found, MpiArrival* arrival);
  int (*receive)(void* bytes, int size_bytes, MpiHandle* message, MpiHandle* request);
  /// Gathers `size_bytes` of every rank on every rank.
  int (*gather)(const void* input, int size_bytes, void* output, MpiHandle* request);
  int (*test)(MpiHandle* request, int* done);
  void (*error_text)(int error, char* text, std::size_t text_bytes);
};

/// The name of the library's only symbol.
inline constexpr const char* kMpiFunctionsSymbol = "ziggurat_mpi_functions";
using GetMpiFunctions = const MpiFunctions* (*)();

}  // namespace ziggurat
