// SPDX-License-Identifier: Apache-2.0
// collectives/mpi/mpi_shim.cc: libziggurat_mpi.so: implements mpi_functions.h with the MPI whose
// <mpi.h> this is compiled against. Links no other code of ours.
#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "collectives/mpi/mpi_functions.h"

namespace {

using ziggurat::MpiArrival;
using ziggurat::MpiFunctions;
using ziggurat::MpiHandle;

static_assert(sizeof(MPI_Request) <= sizeof(MpiHandle) && sizeof(MPI_Message) <= sizeof(MpiHandle));

MPI_Comm ranks = MPI_COMM_NULL;  // a duplicate, so that messages of other code are not seen

template <class Native>
MpiHandle stored(Native native) {
  MpiHandle handle{};
  std::memcpy(handle.bytes, &native, sizeof(native));
  return handle;
}

template <class Native>
Native restored(const MpiHandle& handle) {
  Native native;
  std::memcpy(&native, handle.bytes, sizeof(native));
  return native;
}

void copy_text(std::string_view from, char* to, std::size_t to_bytes) {
  const std::size_t length =
      std::min(from.find('\n') == from.npos ? from.size() : from.find('\n'), to_bytes - 1);
  std::memcpy(to, from.data(), length);
  to[length] = '\0';
}

int begin(int* rank, int* world_size, char* library, std::size_t library_bytes) {
  int provided = 0;
  if (const int error = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided)) {
    return error;
  }
  // Makes MPI return errors from now on, because by default it ends the job.
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  if (provided < MPI_THREAD_FUNNELED) return MPI_ERR_OTHER;
  if (const int error = MPI_Comm_dup(MPI_COMM_WORLD, &ranks)) return error;
  if (const int error = MPI_Comm_set_errhandler(ranks, MPI_ERRORS_RETURN)) return error;
  if (const int error = MPI_Comm_rank(ranks, rank)) return error;
  if (const int error = MPI_Comm_size(ranks, world_size)) return error;
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> name{};
  int length = 0;
  if (const int error = MPI_Get_library_version(name.data(), &length)) return error;
  copy_text({name.data(), static_cast<std::size_t>(length)}, library, library_bytes);
  return MPI_SUCCESS;
}

int end() { return MPI_Finalize(); }

int send(const void* bytes, int size_bytes, int to, int tag, MpiHandle* request) {
  MPI_Request native = MPI_REQUEST_NULL;
  const int error = MPI_Isend(bytes, size_bytes, MPI_BYTE, to, tag, ranks, &native);
  *request = stored(native);
  return error;
}

int probe(int tag, int* found, MpiArrival* arrival) {
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Status status;
  if (const int error = MPI_Improbe(MPI_ANY_SOURCE, tag, ranks, found, &message, &status)) {
    return error;
  }
  if (*found == 0) return MPI_SUCCESS;
  arrival->from = status.MPI_SOURCE;
  arrival->message = stored(message);
  return MPI_Get_count(&status, MPI_BYTE, &arrival->size_bytes);
}

int receive(void* bytes, int size_bytes, MpiHandle* message, MpiHandle* request) {
  auto native = restored<MPI_Message>(*message);
  MPI_Request under_way = MPI_REQUEST_NULL;
  const int error = MPI_Imrecv(bytes, size_bytes, MPI_BYTE, &native, &under_way);
  *request = stored(under_way);
  return error;
}

int gather(const void* input, int size_bytes, void* output, MpiHandle* request) {
  MPI_Request native = MPI_REQUEST_NULL;
  const int error =
      MPI_Iallgather(input, size_bytes, MPI_BYTE, output, size_bytes, MPI_BYTE, ranks, &native);
  *request = stored(native);
  return error;
}

int test(MpiHandle* request, int* done) {
  auto native = restored<MPI_Request>(*request);
  const int error = MPI_Test(&native, done, MPI_STATUS_IGNORE);
  *request = stored(native);
  return error;
}

void error_text(int error, char* text, std::size_t text_bytes) {
  std::array<char, MPI_MAX_ERROR_STRING> all{};
  int length = 0;
  if (MPI_Error_string(error, all.data(), &length) != MPI_SUCCESS) length = 0;
  copy_text({all.data(), static_cast<std::size_t>(length)}, text, text_bytes);
}

constexpr MpiFunctions kFunctions{
    MpiFunctions::kVersion, begin, end, send, probe, receive, gather, test, error_text};

}  // namespace

extern "C" [[gnu::visibility("default")]] const MpiFunctions* ziggurat_mpi_functions() {
  return &kFunctions;
}
