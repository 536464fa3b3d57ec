// SPDX-License-Identifier: Apache-2.0
// integrations/c/ziggurat.h: the engine for trainers in any language: plain C, no C++ types.
//
// An embedder computes, and has parameters and gradients in its own memory. The engine keeps
// masters and moments in host memory or on NVMe. On the CPU, it reads gradients and writes new
// parameters where they are.
//
//   ziggurat_runtime_create("{\"threads\": 2}", &runtime);
//   ziggurat_engine_open(runtime, params, count, "{\"store\": \"/nvme/run\"}", &engine);
//   for each step:
//     forward, backward
//     for each parameter p that has a gradient: ziggurat_lend_gradient(engine, p, &gradient, 1);
//     ziggurat_step(engine, &options, &result);
//     ziggurat_wait(engine, ZIGGURAT_ALL_PARAMS);  // or one by one, as the next forward needs them
//   ziggurat_make_durable(engine);
//   ziggurat_engine_close(engine);
//   ziggurat_runtime_destroy(runtime);
//
// Several processes may be ranks of one job (ziggurat_runtime_create()). Each of them opens an
// engine of its own pieces of the parameters, of any shape. The ranks exchange gradients and
// parameters themselves, with ziggurat_exchange_open() or anything else. The engines stay at the
// same step: all ranks make a step or none does, and a crash leaves all at the same step. Every
// rank opens the engines and exchanges of a runtime in the same order.
//
// Every call returns a status; ziggurat_last_error() says in words why the last call that failed on
// this thread has failed. A handle that does not exist, a parameter that the model does not have or
// a size that does not fit is an error, and changes nothing. Calls may come from any thread; calls
// of one engine are made one after the other, but for those that acquire units. A process that was
// forked makes no calls with its parent's handles: they would wait forever. C99 or later.
// Structs begin with the size that they had when the caller was compiled: set it with
// ZIGGURAT_INIT, which also clears the rest.
//
// An engine that has failed (because of a drive or another rank) returns that error from the next
// call that lends it something, asks it for state or waits for it, and from every later one. When
// such a call returns, all memory that was lent to the engine is the caller's again: nothing reads
// or writes gradients or parameters any more.
//
// ABI 0: may still change from one version to the next.
#ifndef ZIGGURAT_H
#define ZIGGURAT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define ZIGGURAT_API __attribute__((visibility("default")))
#else
#define ZIGGURAT_API
#endif

#define ZIGGURAT_ABI_VERSION 0

/// Says what the caller should do next.
typedef int32_t ziggurat_status;
enum {
  ZIGGURAT_OK = 0,
  ZIGGURAT_INVALID_ARGUMENT = 1,    ///< fix the call or the settings
  ZIGGURAT_RESOURCE_EXHAUSTED = 2,  ///< free something, or give a larger budget
  ZIGGURAT_UNAVAILABLE = 3,         ///< the file or device is gone or in use
  ZIGGURAT_DEADLINE_EXCEEDED = 4,   ///< the call waited as long as was allowed
  ZIGGURAT_DATA_LOSS = 5,           ///< the store is damaged: restore it
  ZIGGURAT_CANCELLED = 6,           ///< somebody asked to stop
  ZIGGURAT_UNIMPLEMENTED = 7,       ///< not supported: do it in another way
  ZIGGURAT_INTERNAL = 8,            ///< a fault of the engine itself
  ZIGGURAT_NOT_FINITE = 9           ///< the gradients' norm is not finite: skip the step
};

typedef int32_t ziggurat_dtype;
enum { ZIGGURAT_FP32 = 0, ZIGGURAT_BF16 = 1, ZIGGURAT_FP16 = 2 };

/// Handles. 0 is never a handle. A handle must not be used after its object is closed.
typedef uint64_t ziggurat_runtime;
typedef uint64_t ziggurat_engine;
typedef uint64_t ziggurat_device;
typedef uint64_t ziggurat_exchange;
typedef uint64_t ziggurat_checkpoint;
typedef uint64_t ziggurat_save;
typedef uint64_t ziggurat_stash;

#ifndef __cplusplus
#define ZIGGURAT_INIT(type) \
  { .struct_size = sizeof(type) }
#else
#define ZIGGURAT_INIT(type) ziggurat_init<type>()
extern "C++" template <class Struct>
Struct ziggurat_init() noexcept {
  Struct its{};
  its.struct_size = sizeof(Struct);
  return its;
}
#endif

/// Elements in the caller's memory, one after the other.
typedef struct ziggurat_memory {
  uint32_t struct_size;
  ziggurat_dtype dtype;
  void* address;
  uint64_t size_bytes;
} ziggurat_memory;

/// Bit of ziggurat_param.flags: the parameter is streamed and never trained. The store has nothing
/// of it, so write it after each open with ziggurat_write_param(); until then it is zero. It takes
/// no gradient and has no state. Frozen parameters come after all others in the table.
#define ZIGGURAT_FROZEN 1u
/// Bit of ziggurat_param.flags, for all streamed parameters of a unit: some steps do not use the
/// unit, as a router leaves out an expert. It is brought ahead only where the last two steps have
/// used it at the same place among the units that all steps use.
#define ZIGGURAT_OPTIONAL 2u
/// Bit of ziggurat_param.flags: the parameter is streamed, although it has an address. A new store
/// begins with the values that are there, and so does a parameter that a checkpoint lacks. They are
/// read while the engine is opened, and never written.
#define ZIGGURAT_STREAMED 4u

typedef struct ziggurat_param {
  uint32_t struct_size;
  uint32_t group;          ///< index in ziggurat_step_options.groups
  const char* name;        ///< unique in the model
  const int64_t* shape;    ///< `dimensions` of them
  uint32_t dimensions;     ///< 0: one element
  uint32_t unit;           ///< of a streamed one: the unit with which it is acquired, from 0 on
  ziggurat_memory values;  ///< the parameter, lent to the engine until it is closed; a new store's
                           ///< masters are made from it, at the first step if state is on NVMe.
                           ///< With a null address only its dtype counts: then the parameter is
                           ///< streamed, see ziggurat_acquire()
  uint32_t flags;          ///< of ZIGGURAT_FROZEN, ZIGGURAT_OPTIONAL and ZIGGURAT_STREAMED
  uint32_t reserved;
} ziggurat_param;

/// Bits of ziggurat_group.flags.
enum {
  ZIGGURAT_NESTEROV = 1,  ///< SGD: the update is gradient + beta1 * momentum instead of the
                          ///< momentum
  ZIGGURAT_MAXIMIZE = 2   ///< goes up the gradient; decay still goes towards zero
};

/// What a step does to the parameters of one group.
typedef struct ziggurat_group {
  uint32_t struct_size;
  float learning_rate;
  float beta1;  ///< SGD: the momentum
  float beta2;
  float eps;
  float weight_decay;
  float lr_decay;   ///< divides a parameter's learning rate in its step t by (1 + (t - 1) *
                    ///< lr_decay)
  float dampening;  ///< SGD: the share of every gradient but the first that the momentum leaves out
  uint32_t flags;   ///< of ZIGGURAT_NESTEROV and ZIGGURAT_MAXIMIZE
} ziggurat_group;

/// Says that ziggurat_give_blob() gives the blob after the step. Until then the step is not
/// durable, and neither ziggurat_step() nor ziggurat_make_durable() may be called.
#define ZIGGURAT_BLOB_FOLLOWS 1u
/// Says that ziggurat_step() returns only when all parameters whose state is in memory are updated.
/// This is for a caller that computes on the same cores, where a forward beside updates is slowed
/// down.
#define ZIGGURAT_UPDATE_AT_ONCE 2u

typedef struct ziggurat_step_options {
  uint32_t struct_size;
  uint32_t group_count;          ///< the largest ziggurat_param.group, plus one
  const ziggurat_group* groups;  ///< an array of `group_count` groups
  float grad_scale;  ///< multiplies every gradient, in addition to its own scale; 0 is the same as
                     ///< 1
  uint32_t flags;    ///< of ZIGGURAT_BLOB_FOLLOWS and ZIGGURAT_UPDATE_AT_ONCE
  const void* blob;  ///< the caller's own state; copied, and made durable with this step
  uint64_t blob_bytes;  ///< at most 1 MiB
} ziggurat_step_options;

typedef struct ziggurat_step_result {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t generation;  ///< finished steps
} ziggurat_step_result;

typedef struct ziggurat_state {
  uint32_t struct_size;
  int32_t resumed;              ///< 1 if open found a store and resumed it
  uint64_t generation;          ///< finished steps
  uint64_t durable_generation;  ///< the newest one that survives a crash; 0: perhaps none
  uint64_t blob_bytes;          ///< size of the blob of the generation at which open resumed
  uint64_t blob_ranks;  ///< if the store was divided anew since that blob was given: how many
                        ///< ranks it had then, of which rank 0's blob is given to every
                        ///< rank; otherwise 0
} ziggurat_state;

/// Return the ABI of the library in use, and its version, such as "0.1.0".
ZIGGURAT_API int32_t ziggurat_abi_version(void);
ZIGGURAT_API const char* ziggurat_version(void);

/// Returns the message of this thread's last call that failed; "" if none has. The text stays until
/// the next call that fails.
ZIGGURAT_API const char* ziggurat_last_error(void);
/// Returns that message for a binding that has words of its own: settings have the engine's names,
/// in backticks (`resume=auto`), and advice that a C caller cannot follow is not left out.
ZIGGURAT_API const char* ziggurat_last_error_in_settings(void);

/// Creates workers and the thread that decides; engines share them. `settings` is a JSON object, or
/// null:
///
///   "threads"              number of workers; absent or 0: this process's share of the machine
///   "rank", "world_size"   this process is one of several; absent: it is alone, whatever a
///                          launcher's variables say. The keys below are for several processes
///   "rendezvous"           "HOST:PORT": an address of rank 0's machine, which listens there until
///                          all ranks have come
///   "secret"               a text that all ranks know; may be absent if all are on this host
///   "connect_timeout_s"    how long to wait until all ranks have come; absent: 300
///   "call_timeout_s"       how long no rank may finish any work before the job ends; absent: 600
///
/// Waits for all ranks. Errors: ZIGGURAT_DEADLINE_EXCEEDED, naming the ranks that did not come.
ZIGGURAT_API ziggurat_status ziggurat_runtime_create(const char* settings,
                                                     ziggurat_runtime* runtime);
/// Ends all that the ranks of a runtime have under way among themselves, on all of them, for a
/// caller who knows that they wait for each other in vain: their calls, and later ones, fail with
/// ZIGGURAT_UNAVAILABLE and `reason`.
ZIGGURAT_API ziggurat_status ziggurat_ranks_abort(ziggurat_runtime runtime, const char* reason);
/// Destroys a runtime. Errors: ZIGGURAT_INVALID_ARGUMENT while an engine, a device, an exchange or
/// a checkpoint is open on it.
ZIGGURAT_API ziggurat_status ziggurat_runtime_destroy(ziggurat_runtime runtime);

/// Opens or creates the state of `count` parameters. `settings` is a JSON object with the engine's
/// settings by the names that `ziggurat train --help` has, with underscores, and with:
///
///   "store"            a directory, or a list of them; may be absent with "placement":
///                      "optimizer=host" or "auto", and then nothing is ever durable
///   "placement"        as for `ziggurat train`, but the optimizer's state is on host or nvme.
///                      "auto": the engine keeps in host memory what fits into "host_memory", or
///                      else, with the other ranks of the machine, into half of the memory that is
///                      free; the rest is in the store, and without a store that is an error.
///                      State in host memory is durable at times ("durable_every") and after
///                      ziggurat_make_durable(), not with each step; so where a store is there
///                      already, the state is on nvme, whatever was chosen when it was made.
///                      ziggurat_describe() says what was chosen and why
///   "run"              a text that names the model as a whole, its data and the like: all ranks
///                      must have the same, and so must a store that is resumed; "reshard" gives
///                      the store this run's
///   "first_elements"   if the parameters are slices of those that have their names: a list with
///                      the number of each slice's first element in the whole, which keys
///                      stochastic rounding
///   "pieces"           a list, which says for each parameter that is not frozen what it is of a
///                      whole one: {"name", "shape"} of the whole, and "first" for elements that
///                      follow one another, or "offsets" and "box"; null for what belongs to no
///                      whole, whose state begins anew when the store is divided. A new store keeps
///                      the list, and then it can be divided among other ranks
///   "wholes"           if each rank has slices of streamed parameters, and is brought whole ones:
///                      a list of {"name", "count", "dtype", "unit"} of every whole one, the same
///                      on all ranks, with {"param", "first"}: this rank's slice, which is a
///                      parameter of that unit, and its first element; null or absent if it has
///                      none. "dtype" is "fp32", "bf16" or "fp16"; "trained": false if the slices
///                      are ZIGGURAT_FROZEN, "optional": true if they are ZIGGURAT_OPTIONAL, and
///                      "quantized": true if ziggurat_acquire() brings it in int8, in blocks of 256
///                      elements of a slice: 1.016 bytes an element come from other ranks, and each
///                      is within 0.40 % of the largest in its block, with the same bits on all
///                      ranks. In the order of ranks the slices of each are all of it, or those
///                      of every G consecutive ranks, which are the same then, with the same
///                      gradients, and of which units are put together. See ziggurat_acquire()
///   "hpz"              with "wholes", the same on all ranks: the number of consecutive ranks, a
///                      divisor of G, each of which keeps in host memory a part of what they have
///                      got from other ranks, so that it comes to them once between two steps
///   "resume"           what is done with a store that is there. "auto", which is the default,
///                      resumes it, and refuses that of other ranks or pieces; "reshard" first
///                      divides it, in place, for the ranks and "pieces" that are there, if they
///                      differ: every rank reaches all files of the store; "never" replaces it
///                      with the first state that is durable;
///                      "new" is an error
///   "device_memory"    how much host memory streamed parameters take while they are acquired or
///                      brought ahead: bytes, or a text such as "4GiB"
///   "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size"
///                      narrower limits of that, in elements: what is there at once, what is used
///                      between two uses of a unit that stays, and what is brought ahead
///   "param_persistence_threshold"
///                      pieces of at most so many elements stay until the step
///   "device"           in its place: a handle of ziggurat_device_open(), for memory of a GPU, or
///                      memory that the caller lends
///   "progress"         true: an opening of over two seconds says on standard error how far it is
///
/// Without "host_memory" the engine takes as much as a run uses well. If a store is resumed, the
/// parameters are written, also if the call then fails: before another try that makes a new store
/// from them, give them their first values again.
ZIGGURAT_API ziggurat_status ziggurat_engine_open(ziggurat_runtime runtime,
                                                  const ziggurat_param* params, uint64_t count,
                                                  const char* settings, ziggurat_engine* engine);
/// Lists the parameters that this rank has in the store of `settings`, in the order and with the
/// names that open needs to resume it: a JSON array of {"name", "shape", "dtype", "whole"}, or "[]"
/// if there is no store. "whole" has "name" and "shape" of the parameter of which it is a part, or
/// is null if the store does not say it. Nothing is locked or written. `text` and `needed_bytes`
/// are as in ziggurat_describe(). Errors: ZIGGURAT_DATA_LOSS for a file that is too damaged to say
/// what it has.
ZIGGURAT_API ziggurat_status ziggurat_stored_params(ziggurat_runtime runtime, const char* settings,
                                                    char* text, uint64_t capacity_bytes,
                                                    uint64_t* needed_bytes);
/// Measures how many bytes of memory this process may still take: what the machine has left, or
/// what the limits of its control groups leave. Pages of files count as free.
ZIGGURAT_API ziggurat_status ziggurat_free_memory(uint64_t* free_bytes);
/// Says what "placement": "auto" would choose for an engine of these parameters and `settings`, of
/// which "placement" is not looked at, while `free_bytes` of memory are free
/// (ziggurat_free_memory()) for all ranks that a launcher's variables count on this machine. A
/// store that is there is not looked at either. Nothing is opened or written, and no address is
/// followed. The text is a JSON object:
///
///   "placement"          what open takes: "params=host,grads=host,optimizer=nvme"
///   "why"                what needs how much, and which memory decided it
///   "state_bytes"        host memory that the optimizer's state takes
///   "beside_nvme_bytes"  "host_memory" with which a state on nvme keeps records in memory, which
///                        a step does not read then; 0 if that is not worth it
///
/// `text` and `needed_bytes` are as in ziggurat_describe(). Errors: those of open, if nothing fits.
ZIGGURAT_API ziggurat_status ziggurat_choose_placement(const ziggurat_param* params, uint64_t count,
                                                       const char* settings, uint64_t free_bytes,
                                                       char* text, uint64_t capacity_bytes,
                                                       uint64_t* needed_bytes);
/// Says what `auto` would take for an engine of these parameters that brings units of them to host
/// memory: where the state is, and how much memory units and records have. "placement" and
/// "device_memory" of `settings` are not looked at; its "host_memory", if given, is kept. `facts`
/// is a JSON object of sizes in bytes, for one rank:
///
///   "units_least_bytes"  memory for units with which each runs while the next one is brought
///   "units_all_bytes"    with which all units are there at once
///   "brought_bytes"      of all units, as a forward brings them
///   "live_there"         true: parameters that all have room among the units are kept there, once
///   "has_folder"         true: parameters and gradients may be on a drive though the state is not
///   "gradient_bytes"     what gradients of a step take in the trainer's memory
///   "beside_bytes"       what else the trainer's memory has, whatever is chosen
///   "in_place_bytes"     of parameters that are used where they are kept, beside those of units:
///                        in memory, or on the drive if those of units are there
///   "in_place_moved_bytes", "in_place_gradient_bytes"
///                        if they are on the drive: what a step reads and writes there of them, and
///                        which of "gradient_bytes" are there too
///   "free_bytes"         memory that is free (ziggurat_free_memory()) or is going to be, for all
///                        ranks of this machine; a quarter is left for activations and the rest
///   "here_bytes"         of what a rank is going to take, what its memory has now and gives back,
///   as
///                        every rank's does, beside what is free
///   "node_ranks"         how many ranks these are, if no launcher has said so
///   "memory", "params", "grads", "optimizer"
///                        if they are given by hand: the memory for units, and "host" or "nvme"
///
/// All that is absent is 0, false or open. Ranks that give the same facts get the same answer if
/// they have the same machine profile (`ziggurat profile --measure`); so let one rank ask for all.
/// Nothing is opened or written, and no address is followed. The text is a JSON object:
///
///   "placement"    what open takes: "params=device,grads=host,optimizer=nvme"
///   "memory"       "device_memory" of open
///   "host_memory"  that of open; 0 for a state in host memory, which takes what it needs
///   "takes_bytes"  both, gradients, and what lies beside
///   "drive_bytes"  what a step reads and writes on the drive
///   "drive_s"      how long that takes at the rate that was measured; 0 if none was
///   "why"          a line for people
///
/// `text` and `needed_bytes` are as in ziggurat_describe(). Errors: ZIGGURAT_RESOURCE_EXHAUSTED if
/// there is too little memory for any choice, with the least that works.
ZIGGURAT_API ziggurat_status ziggurat_choose_memory(const ziggurat_param* params, uint64_t count,
                                                    const char* settings, const char* facts,
                                                    char* text, uint64_t capacity_bytes,
                                                    uint64_t* needed_bytes);
/// Says how long a step takes of a trainer that uses these parameters as `recording` says, with an
/// engine that has `settings`: that engine is played in virtual time, on this machine as `ziggurat
/// profile --measure` has measured it. One rank, whose units come to host memory; every parameter
/// that is not frozen has a gradient. `recording` is a JSON object:
///
///   "events"          what the trainer does in a step, in order, an array of arrays:
///                       ["compute", SECONDS], on as many threads as the machine has cores, or
///                       ["compute", SECONDS, THREADS]: on cores that do nothing else
///                       ["acquire", UNIT], ["release", UNIT], ["wait", PARAM]: the calls
///                       ["gradient", PARAM]: is there, for the step
///                       ["add_gradient", PARAM]: is added to its sum on NVMe (grads=nvme)
///                       ["step"], once
///   "fp32_gradients"  true: what "gradient" lends is in fp32, whatever its parameter is in; what
///                     "add_gradient" adds has its parameter's type
///   "update_at_once"  true: the step is made with ZIGGURAT_UPDATE_AT_ONCE
///   "drive_bytes_per_s"
///                     of the store's drive, reads and writes together, in place of what was
///                     measured; at least 1000
///   "threads"         of the runtime, as in ziggurat_runtime_create(); absent: as many as the
///                     machine has cores
///
/// Nothing is opened or written, and no address is followed. The text is a JSON object, of a step
/// among many:
///
///   "seconds"         of the step; and of these those in which the trainer computed ("compute_s"),
///                     waited for parameters ("params_s"), handed gradients over ("gradients_s"),
///                     and was in the step's call ("step_s")
///   "copies_busy_s", "update_busy_s", "drive_busy_s"
///                     how long copies of units, the update and the drive were busy meanwhile
///   "read_bytes", "written_bytes"
///                     over the drive
///   "workers"         of the engine
///
/// `text` and `needed_bytes` are as in ziggurat_describe(). Errors: those of open and of the calls;
/// ZIGGURAT_INVALID_ARGUMENT if this machine, or the drive of "store", has not been measured.
ZIGGURAT_API ziggurat_status ziggurat_simulate(const ziggurat_param* params, uint64_t count,
                                               const char* settings, const char* recording,
                                               char* text, uint64_t capacity_bytes,
                                               uint64_t* needed_bytes);
/// The memory to which streamed parameters are brought.
enum { ZIGGURAT_HOST_MEMORY = 0, ZIGGURAT_CUDA_MEMORY = 1 };
typedef struct ziggurat_device_memory {
  uint32_t struct_size;
  int32_t kind;   ///< ZIGGURAT_HOST_MEMORY or ZIGGURAT_CUDA_MEMORY
  int32_t index;  ///< CUDA's number of the GPU; 0 for host memory
  uint32_t reserved;
  void* address;  ///< memory that the caller lends until the device is closed, and that nothing
                  ///< else uses meanwhile; 4096 divides its address, or 256 that of a GPU's. Null:
                  ///< the device takes memory of its own
  uint64_t size_bytes;  ///< never is more used
} ziggurat_device_memory;

/// Opens a device of that memory, for "device" of ziggurat_engine_open(). One engine of the runtime
/// has it at a time; gradients and parameters that are lent stay in host memory. Errors:
/// ZIGGURAT_INVALID_ARGUMENT for memory that is not aligned, or not the GPU's; ZIGGURAT_UNAVAILABLE
/// if there is no GPU that can be used; ZIGGURAT_RESOURCE_EXHAUSTED if it has less free memory.
ZIGGURAT_API ziggurat_status ziggurat_device_open(ziggurat_runtime runtime,
                                                  const ziggurat_device_memory* memory,
                                                  ziggurat_device* device);
/// Closes a device. Lent memory is the caller's again. Errors: ZIGGURAT_INVALID_ARGUMENT while an
/// engine has it, or a call of that engine is still returning.
ZIGGURAT_API ziggurat_status ziggurat_device_close(ziggurat_device device);
/// Closes an engine. State that is not durable is lost: call ziggurat_make_durable() before. A
/// thread that waits in ziggurat_acquire() for memory gets ZIGGURAT_CANCELLED; one whose parameters
/// are being brought waits for the drive first.
ZIGGURAT_API ziggurat_status ziggurat_engine_close(ziggurat_engine engine);

/// Opens an exchange, with which ranks exchange host memory among themselves, in addition to what
/// their engines exchange. All ranks open it by the same name, at the same place among their
/// engines and exchanges; it works on one rank too. Calls may come from any thread. On every rank
/// they begin in the same order, with the same sizes, and several may be under way. Their memory
/// belongs to the exchange from begin to ziggurat_finish(). After any error except
/// ZIGGURAT_INVALID_ARGUMENT from begin, this runtime exchanges nothing more, and its engines make
/// no other step. A rank that ends fails the calls of all others with ZIGGURAT_UNAVAILABLE, whose
/// message names that rank and the call.
ZIGGURAT_API ziggurat_status ziggurat_exchange_open(ziggurat_runtime runtime, const char* name,
                                                    ziggurat_exchange* exchange);
/// Closes an exchange. Waits for calls that are under way.
ZIGGURAT_API ziggurat_status ziggurat_exchange_close(ziggurat_exchange exchange);
/// Sends slice r of `input` to rank r and receives slice r of `output` from it, `slice_bytes` each.
/// `input` and `output` must not overlap.
ZIGGURAT_API ziggurat_status ziggurat_begin_all_to_all(ziggurat_exchange exchange,
                                                       const void* input, void* output,
                                                       uint64_t slice_bytes, uint64_t* ticket);
/// Gathers the `input` of all ranks: slice r of `output` becomes the `input` of rank r. A rank's
/// own `input` may lie in its slice of `output` already.
ZIGGURAT_API ziggurat_status ziggurat_begin_all_gather(ziggurat_exchange exchange,
                                                       const void* input, void* output,
                                                       uint64_t input_bytes, uint64_t* ticket);
/// Replaces `values` by their sums over the ranks, added in the order of ranks, so that all ranks
/// get the same bits. Meant for a few values.
ZIGGURAT_API ziggurat_status ziggurat_begin_all_reduce_doubles(ziggurat_exchange exchange,
                                                               double* values, uint64_t count,
                                                               uint64_t* ticket);
ZIGGURAT_API ziggurat_status ziggurat_begin_barrier(ziggurat_exchange exchange, uint64_t* ticket);
/// Waits for the call that has `ticket`. Finish each call once.
ZIGGURAT_API ziggurat_status ziggurat_finish(ziggurat_exchange exchange, uint64_t ticket);

/// What callers exchange among ranks may travel in 8 or 4 bits: in blocks of 256 elements, each a
/// scale in fp32 and the codes. An element is within 0.40 % of the largest in its block in 8 bits,
/// within 7.2 % in 4; a block with a value that is not finite becomes NaN. Neither the number of
/// workers nor the instruction set changes a bit.
///
/// Gets how many bytes the codes of `count` elements take.
ZIGGURAT_API ziggurat_status ziggurat_quantized_bytes(uint32_t bits, uint64_t count,
                                                      uint64_t* size_bytes);
/// Encodes `values` in `rows` rows of as many elements. The codes of each begin `stride_bytes`
/// after those of the row before; what lies between stays as it is. Works on the runtime's workers.
ZIGGURAT_API ziggurat_status ziggurat_quantize(ziggurat_runtime runtime, uint32_t bits,
                                               const ziggurat_memory* values, uint64_t rows,
                                               void* codes, uint64_t stride_bytes);
/// Sums `rows` rows of such codes, in their order and in fp32: element i of `sums`, which is fp32,
/// becomes the sum of the rows' elements i.
ZIGGURAT_API ziggurat_status ziggurat_sum_quantized(ziggurat_runtime runtime, uint32_t bits,
                                                    const void* codes, uint64_t rows,
                                                    uint64_t stride_bytes,
                                                    const ziggurat_memory* sums);

/// Lends the gradient of parameter `param` (its index in open's array) for the step to come, in
/// place of an earlier one. The gradient is multiplied by `scale`, and may have any type. The
/// memory is the caller's again after ziggurat_wait() for the parameter, or
/// ziggurat_discard_gradients(). A step leaves a parameter without a gradient alone: it does not
/// decay, and the step is not counted for it.
ZIGGURAT_API ziggurat_status ziggurat_lend_gradient(ziggurat_engine engine, uint64_t param,
                                                    const ziggurat_memory* gradient, float scale);
/// Lends the gradients of `count` parameters in one call: gradient i is that of parameter
/// `params[i]`, has as many elements, has the type `dtypes[i]`, lies at `addresses[i]` and is
/// multiplied by `scales[i]`. `dtypes` may be null if all are fp32, and `scales` if nothing
/// multiplies them. If one is wrong, the error names it, and none is lent.
ZIGGURAT_API ziggurat_status ziggurat_lend_gradients(ziggurat_engine engine, uint64_t count,
                                                     const uint64_t* params, void* const* addresses,
                                                     const ziggurat_dtype* dtypes,
                                                     const float* scales);
/// Adds to the gradient of `param`, for steps of several backwards: in fp32, in the engine's own
/// memory, or in a file if "placement" has "grads=nvme". What was lent before and `gradient` are
/// the caller's again when this returns. After an error of the drive the sum may lack a part of
/// `gradient`: the step is refused until ziggurat_discard_gradient().
ZIGGURAT_API ziggurat_status ziggurat_add_gradient(ziggurat_engine engine, uint64_t param,
                                                   const ziggurat_memory* gradient, float scale);
/// Sets the factor by which the step to come multiplies the gradient of `param`, in place of the
/// one that it was lent with; of a sum, after the last addition. Does nothing if there is no
/// gradient.
ZIGGURAT_API ziggurat_status ziggurat_scale_gradient(ziggurat_engine engine, uint64_t param,
                                                     float scale);
/// Discards the gradient of `param` for the step to come, if there is one.
ZIGGURAT_API ziggurat_status ziggurat_discard_gradient(ziggurat_engine engine, uint64_t param);
/// Discards all gradients of the step to come.
ZIGGURAT_API ziggurat_status ziggurat_discard_gradients(ziggurat_engine engine);
/// Computes the 2-norm of all gradients of the step to come, each times its scale: infinite or NaN
/// if one of them is not finite. A caller that clips gives the step min(1, limit / norm) as its
/// grad_scale. A caller that scales its loss discards gradients whose norm is not finite.
ZIGGURAT_API ziggurat_status ziggurat_gradient_norm(ziggurat_engine engine, double* norm);
/// Says that gradients of the step to come are being computed, so that the engine may read records
/// meanwhile.
ZIGGURAT_API ziggurat_status ziggurat_expect_gradients(ziggurat_engine engine);

/// Says that the caller has moved the parameter to `values`, with the same content. Waits for an
/// update that is under way.
ZIGGURAT_API ziggurat_status ziggurat_lend_param(ziggurat_engine engine, uint64_t param,
                                                 const ziggurat_memory* values);
/// Says that the caller has written the parameter: before the next step its master is taken from it
/// again, and its moments stay. Until then ziggurat_read_state() and saves have the master of
/// before; but a streamed parameter that is written before the first step is its master at once. On
/// a GPU the work that wrote it has ended.
ZIGGURAT_API ziggurat_status ziggurat_param_written(ziggurat_engine engine, uint64_t param);

/// Streamed parameters have no address in ziggurat_param.values: the engine keeps them where
/// "placement" says ("params=host" or "params=nvme"; "params=device" keeps all of them in
/// "device_memory" or the "device"), and brings all parameters of a unit when the caller acquires
/// it. Everything else is as with parameters that are lent. In a new store they begin with zeros:
/// write them before the first step. Units that are used in the same order in each step are brought
/// ahead.
///
/// With "wholes" a unit consists of whole parameters, of which this rank's slices come from its own
/// home, and the others from their ranks' homes, whatever the trainers of those do: a rank may
/// acquire units that no other uses. The calls below that take a streamed parameter take a whole
/// one by the number COUNT + W, for whole W beside COUNT parameters. A whole one is written on all
/// ranks, with the same values, and from the first one's write to the last one's no rank uses its
/// unit but to write. A rank closes its engine when no other acquires any more. Gradients and state
/// are those of slices.
///
/// Acquires a unit: its parameters are in memory, as of the newest step, until as many releases as
/// acquires. May wait for memory that a release on another thread gives back, and holds up no other
/// call. With a device on a GPU, `stream` is a stream of it (cudaStream_t; null is CUDA's default
/// stream), which lives until the engine is closed: work that is queued on it from now on finds the
/// parameters. Otherwise it is null. Errors: ZIGGURAT_RESOURCE_EXHAUSTED if memory
/// cannot come back, because each thread that has acquired a unit waits for another one.
ZIGGURAT_API ziggurat_status ziggurat_acquire(ziggurat_engine engine, uint32_t unit, void* stream);
/// The same for who reads or writes parameters beside the forward and backward: those that are
/// quantized ("wholes") come as they are, and the order is not learned. A unit that has some is
/// written only so. Errors: ZIGGURAT_INVALID_ARGUMENT too while the unit is acquired with rounded
/// values.
ZIGGURAT_API ziggurat_status ziggurat_acquire_aside(ziggurat_engine engine, uint32_t unit,
                                                    void* stream);
/// Releases a unit; what is queued on `stream` so far is the last work that uses it. All units are
/// released before ziggurat_step().
ZIGGURAT_API ziggurat_status ziggurat_release(ziggurat_engine engine, uint32_t unit, void* stream);
/// Brings units ahead, as far as there is room: they are acquired next, in this order. Never
/// needed.
ZIGGURAT_API ziggurat_status ziggurat_expect_units(ziggurat_engine engine, const uint32_t* units,
                                                   uint64_t count);
/// Gets where a streamed parameter is while its unit is acquired: an address of the GPU, if the
/// device is one. The caller may write it there, and then calls ziggurat_param_written() before the
/// release.
ZIGGURAT_API ziggurat_status ziggurat_param_memory(ziggurat_engine engine, uint64_t param,
                                                   ziggurat_memory* place);
/// Gets where `count` streamed parameters of acquired units are: `addresses[i]` is that of
/// parameter `params[i]`. Sets none if one of them is away.
ZIGGURAT_API ziggurat_status ziggurat_param_addresses(ziggurat_engine engine, uint64_t count,
                                                      const uint64_t* params, void** addresses);
/// Reads a streamed parameter, or writes it, in its own type; `values` are in host memory. Acquires
/// its unit meanwhile, so that no other thread can make a step. A slice of a whole one is read and
/// written where it lives; its unit is not acquired then, by nobody.
ZIGGURAT_API ziggurat_status ziggurat_read_param(ziggurat_engine engine, uint64_t param,
                                                 const ziggurat_memory* values);
ZIGGURAT_API ziggurat_status ziggurat_write_param(ziggurat_engine engine, uint64_t param,
                                                  const ziggurat_memory* values);
/// Reads the gradient of the step to come, times its scale, in fp32. Sets `has_gradient` to 0, and
/// reads nothing, if there is none.
ZIGGURAT_API ziggurat_status ziggurat_read_gradient(ziggurat_engine engine, uint64_t param,
                                                    const ziggurat_memory* values,
                                                    int32_t* has_gradient);

/// Makes a step of all gradients. From now on parameters are written, until ziggurat_wait() for
/// them returns; in a new store's first step those without a gradient are read, too. Errors:
/// ZIGGURAT_INVALID_ARGUMENT for settings with which no step can be made; nothing was changed then,
/// and the gradients are still those of the step to come. After any other error the engine has
/// ended. All ranks make every step, even those that have no gradient. If one rank refuses a step,
/// none makes it, and the error on every rank names the one that refused. Callers average and clip
/// by themselves; they also choose the settings of groups, which are not compared among ranks.
ZIGGURAT_API ziggurat_status ziggurat_step(ziggurat_engine engine,
                                           const ziggurat_step_options* options,
                                           ziggurat_step_result* result);
/// Stands for all parameters in place of an index.
#define ZIGGURAT_ALL_PARAMS UINT64_MAX
/// Waits until the newest step has updated the parameter.
ZIGGURAT_API ziggurat_status ziggurat_wait(ziggurat_engine engine, uint64_t param);
/// Gives the blob of the newest step, which was made with ZIGGURAT_BLOB_FOLLOWS.
ZIGGURAT_API ziggurat_status ziggurat_give_blob(ziggurat_engine engine, const void* blob,
                                                uint64_t blob_bytes);
/// Gets the number of steps that the parameter has made.
ZIGGURAT_API ziggurat_status ziggurat_param_steps(ziggurat_engine engine, uint64_t param,
                                                  uint64_t* steps);

/// Lists what the optimizer keeps of a parameter, one name in a line, ending in a zero: "master",
/// then its moments as torch.optim calls them. `text` and `needed_bytes` are as in
/// ziggurat_describe().
ZIGGURAT_API ziggurat_status ziggurat_state_names(ziggurat_engine engine, char* text,
                                                  uint64_t capacity_bytes, uint64_t* needed_bytes);
/// Describes the optimizers and the formats of their state that this library has, as a JSON object:
///
///   "optimizers"  a list of objects: "name", as settings spell it; "title", the name of its class
///   in
///                 Python; "moments", as torch.optim calls them; "settings", the learning rate and
///                 whatever else it reads, with their defaults: "lr", "weight_decay", "betas" or
///                 "momentum", "eps"; and whether it has an "initial_accumulator"
///   "formats"     a list of objects: "name"; whether records have the parameter itself
///                 ("holds_param"); whether state is rounded to bf16 at each step ("rounds_state");
///                 and whether moments are 8-bit codes in blocks ("codes")
///
/// `text` and `needed_bytes` are as in ziggurat_describe().
ZIGGURAT_API ziggurat_status ziggurat_state_kinds(char* text, uint64_t capacity_bytes,
                                                  uint64_t* needed_bytes);
/// Copies the parameter's array `name` of the newest step to `values`, in fp32; `values` has as
/// many elements as the parameter. Waits until that step has updated it.
ZIGGURAT_API ziggurat_status ziggurat_read_state(ziggurat_engine engine, uint64_t param,
                                                 const char* name, const ziggurat_memory* values);
/// Writes the parameter's array `name` from `values`, in fp32. The values are copied, and rounded
/// to nearest as the state's format needs it. The next step goes on from them and, if a master was
/// written, gives the caller's parameter its value. What is written between two steps becomes
/// durable with the second step, as a whole; until then it takes memory. If a master and a
/// parameter were both written (ziggurat_param_written()), the later one counts.
ZIGGURAT_API ziggurat_status ziggurat_write_state(ziggurat_engine engine, uint64_t param,
                                                  const char* name, const ziggurat_memory* values);
/// Lists the parameters, or parts of them, that `rank` has, which may be this rank: one in a line,
/// as its number of elements, a tab and its name. `text` and `needed_bytes` are as in
/// ziggurat_describe().
ZIGGURAT_API ziggurat_status ziggurat_pieces_of(ziggurat_engine engine, int32_t rank, char* text,
                                                uint64_t capacity_bytes, uint64_t* needed_bytes);
/// Does what ziggurat_read_state() does for the parameter that `rank` has by the name `param`: as
/// of this rank's newest step, with what was written there since. That rank need not call anything:
/// its program may compute, sleep, or wait in ziggurat_step(). It cannot make another step
/// meanwhile, because all ranks make every step. Errors: ZIGGURAT_UNAVAILABLE if it has closed its
/// engine.
ZIGGURAT_API ziggurat_status ziggurat_read_state_of(ziggurat_engine engine, int32_t rank,
                                                    const char* param, const char* name,
                                                    const ziggurat_memory* values);
/// Sets the number of steps that the parameter has made. The number becomes durable with the next
/// step.
ZIGGURAT_API ziggurat_status ziggurat_set_param_steps(ziggurat_engine engine, uint64_t param,
                                                      uint64_t steps);

typedef struct ziggurat_save_options {
  uint32_t struct_size;
  uint32_t engine_count;           ///< at least 1
  const ziggurat_engine* engines;  ///< engines of the runtime whose state is saved
  const ziggurat_memory* values;   ///< an array of memory that is saved, too
  uint64_t value_count;
  const void* blob;  ///< the caller's own state; only rank 0's is kept
  uint64_t blob_bytes;
} ziggurat_save_options;

/// Writes a checkpoint of the engines' newest step, with what was written since, and of `values`,
/// into FOLDER/step-NNNNNNNNN: safetensors shards, and a manifest with the hash of every byte. Only
/// one chunk of state is in memory at a time. Returns when the checkpoint is durable under its
/// name. All ranks of the runtime call it, at the same place among their engines and exchanges;
/// each writes its part, and rank 0 commits. `content` is a JSON object, which may differ between
/// ranks only in "engines" and "values":
///
///   "folder", "step"       where the checkpoint is written
///   "keep_last", "keep_every"  which checkpoints of its line of history stay then; 0: all
///   "keep_best"            also keeps that of the "step" in resume's "best_metric"; absent: false
///   "model", "dtype", "placement"  the model's name, its parameters' type, where its state is
///   "resume"               an object: what a run says of itself, by the names that
///                          `ziggurat ckpt verify` asks for
///   "params"               a list: {"name", "shape", "trained"} of every whole parameter of the
///                          model, and "dtype" of one that is not trained, which may be any values
///   "engines"              for each engine a list, which says of each of its parameters that are
///                          not frozen what it is in "params": {"param": INDEX, "first": ELEMENT}
///                          for elements that follow one another, {"param": INDEX, "offsets": [..],
///                          "box": [..]} for a box, or null if another rank saves it
///   "values"               a list, which says the same of each of options.values
///   "widened"              saves moments of 8 bits as the fp32 values that they stand for, as
///   those
///                          of several ranks always are; absent: false
///   "alone"                only this rank calls, and the others do whatever they do between two
///                          steps; absent: false
///   "others"               for a rank that is alone, a list of what the others' engines have:
///                          {"engine", "rank", "name", "param", "first", "count"}. It is read as
///                          ziggurat_read_state_of() reads it, one array in memory at a time
///
/// Together the ranks must have all of each parameter, and none of it twice. Errors:
/// ZIGGURAT_INVALID_ARGUMENT if this step's checkpoint exists already; ZIGGURAT_RESOURCE_EXHAUSTED
/// for a full disk. After an error there is no checkpoint.
ZIGGURAT_API ziggurat_status ziggurat_save_checkpoint(ziggurat_runtime runtime,
                                                      const ziggurat_save_options* options,
                                                      const char* content);
/// Begins to write such a checkpoint, and returns: the caller makes steps while it is written.
/// Everything in it is as of this call. The blob and the values are copied first; the engines'
/// records are copied as they are saved. A step that would change a record which is not saved yet
/// copies it to memory of its own, or waits for it. `content` may say more:
///
///   "memory"               the most bytes that such records may take beside the engines' memory;
///                          absent: 0
///   "stall_max"            the longest time, in seconds, that steps may wait for the save in all;
///                          then it is given up, and training goes on; absent: 60
///   "bandwidth"            the most bytes a second that this rank writes, on average: a save that
///                          fell behind may catch up for a quarter of a second; absent: no limit
///
/// An engine takes part in one save at a time. To close it ends the save: wait first. A rank that
/// saves for "others" cannot save so. Errors: ZIGGURAT_INVALID_ARGUMENT for wrong arguments; all
/// others come from ziggurat_save_wait(), on every rank.
ZIGGURAT_API ziggurat_status ziggurat_save_begin(ziggurat_runtime runtime,
                                                 const ziggurat_save_options* options,
                                                 const char* content, ziggurat_save* save);
/// Sets `under_way` to 1 while the save is under way, and to 0 when it has ended. Never waits.
ZIGGURAT_API ziggurat_status ziggurat_save_under_way(ziggurat_save save, int32_t* under_way);
/// Waits until the save has ended, and gives the checkpoint's directory, as ziggurat_describe()
/// gives a text. May be called again. Errors: those of ziggurat_save_checkpoint(), and
/// ZIGGURAT_DEADLINE_EXCEEDED if steps have waited too long for the save or its drive hangs. After
/// an error there is no checkpoint.
ZIGGURAT_API ziggurat_status ziggurat_save_wait(ziggurat_save save, char* directory,
                                                uint64_t capacity_bytes, uint64_t* needed_bytes);
/// Forgets the save. Waits for it if it is under way.
ZIGGURAT_API ziggurat_status ziggurat_save_close(ziggurat_save save);
/// Opens the checkpoint `path`, or the newest whole one in that folder, whoever saved it.
ZIGGURAT_API ziggurat_status ziggurat_checkpoint_open(ziggurat_runtime runtime, const char* path,
                                                      ziggurat_checkpoint* checkpoint);
ZIGGURAT_API ziggurat_status ziggurat_checkpoint_close(ziggurat_checkpoint checkpoint);
/// Describes a checkpoint as a JSON object: "directory", "step", "model", "dtype", "optimizer"
/// (null if it has only weights), "state_format", "resume", "blob_bytes", and "tensors" with a list
/// [name, owner, array, type, shape] for each. `text` and `needed_bytes` are as in
/// ziggurat_describe().
ZIGGURAT_API ziggurat_status ziggurat_checkpoint_content(ziggurat_checkpoint checkpoint, char* text,
                                                         uint64_t capacity_bytes,
                                                         uint64_t* needed_bytes);
/// Copies the checkpoint's blob, which has "blob_bytes" bytes.
ZIGGURAT_API ziggurat_status ziggurat_checkpoint_blob(ziggurat_checkpoint checkpoint, void* blob,
                                                      uint64_t capacity_bytes);
/// Reads elements of tensor `tensor` from `first` on, as many as `values` has, in the tensor's own
/// type or widened to fp32. Every byte is compared with its hash. Errors: ZIGGURAT_DATA_LOSS naming
/// the file and the tensor.
ZIGGURAT_API ziggurat_status ziggurat_checkpoint_read(ziggurat_checkpoint checkpoint,
                                                      uint64_t tensor, uint64_t first,
                                                      const ziggurat_memory* values);
/// Does what ziggurat_engine_open() does for a new store, with the checkpoint's state. If the
/// formats differ, the state is converted, a chunk at a time. The parameters are written, as if a
/// store were resumed: each gets its master, rounded to its type. `load` is a JSON object. "parts"
/// has for each parameter that is not frozen null or its place in the checkpoint: {"name", "shape"}
/// of the whole, and "first", or "offsets" and "box", as above. "steps" has the number of steps
/// that each has made. "weights_only" loads masters alone, at step 0. A parameter whose master the
/// checkpoint lacks keeps its values, and its master is made from them. Moments that the checkpoint
/// lacks have their initial values.
ZIGGURAT_API ziggurat_status ziggurat_engine_load(ziggurat_runtime runtime,
                                                  const ziggurat_param* params, uint64_t count,
                                                  const char* settings,
                                                  ziggurat_checkpoint checkpoint, const char* load,
                                                  ziggurat_engine* engine);

/// Waits until every finished step is durable.
ZIGGURAT_API ziggurat_status ziggurat_make_durable(ziggurat_engine engine);
ZIGGURAT_API ziggurat_status ziggurat_engine_state(ziggurat_engine engine, ziggurat_state* state);
/// Copies the blob of the generation at which open resumed, which has ziggurat_state.blob_bytes.
ZIGGURAT_API ziggurat_status ziggurat_read_blob(ziggurat_engine engine, void* blob,
                                                uint64_t capacity_bytes);
/// Describes what open chose and found, one thing in a line, ending in a zero. `needed_bytes`, if
/// not null, gets the size of the whole text; `text` may be null.
ZIGGURAT_API ziggurat_status ziggurat_describe(ziggurat_engine engine, char* text,
                                               uint64_t capacity_bytes, uint64_t* needed_bytes);
/// Describes what was moved and waited for so far, as a JSON object: "nvme_read_bytes",
/// "optimizer_cpu_ns", "host_used_bytes" and so on. The counters are those of the runtime, which
/// engines may share; their names may change from one version to the next. `text` and
/// `needed_bytes` are as above.
ZIGGURAT_API ziggurat_status ziggurat_figures(ziggurat_engine engine, char* text,
                                              uint64_t capacity_bytes, uint64_t* needed_bytes);

/// A stash keeps what a trainer needs again later in the step, such as activations, and what was
/// put last is needed first. Its memory has a hard budget; what was put first is written to drives
/// while the trainer goes on, and brought back before it is needed. Nothing of it is left when the
/// process ends.
///
///   forward:   ziggurat_stash_put(stash, values, size_bytes, &ticket);
///   backward:  ziggurat_stash_read(stash, ticket, values, 0, size_bytes);
///   then:      ziggurat_stash_drop(stash, ticket);
///
/// Calls of one stash may come from any thread at any time.
///
/// Opens one. `settings` is a JSON object:
///
///   "store"   a directory, or a list of them on several drives; made if they do not exist
///   "memory"  host memory for items: bytes, or a text such as "4GiB". It is taken at once
ZIGGURAT_API ziggurat_status ziggurat_stash_open(ziggurat_runtime runtime, const char* settings,
                                                 ziggurat_stash* stash);
/// Waits for transfers, and forgets all items. Errors: ZIGGURAT_INVALID_ARGUMENT while another call
/// is under way; nothing is closed then.
ZIGGURAT_API ziggurat_status ziggurat_stash_close(ziggurat_stash stash);
/// Copies an item, and gives its number, which is never 0. Waits while memory is full and the
/// drives are behind. Errors: ZIGGURAT_RESOURCE_EXHAUSTED for an item that is larger than the
/// memory; why the drives could not take others. The stash stays whole, and the call can be made
/// again.
ZIGGURAT_API ziggurat_status ziggurat_stash_put(ziggurat_stash stash, const void* bytes,
                                                uint64_t size_bytes, uint64_t* ticket);
/// Copies `size_bytes` of an item, from `offset_bytes` on, to `address`. Waits until they are in
/// memory. Errors: ZIGGURAT_INVALID_ARGUMENT if the item ends before; those of
/// ziggurat_stash_put(); the drive's; ZIGGURAT_DATA_LOSS if it did not return what was written.
ZIGGURAT_API ziggurat_status ziggurat_stash_read(ziggurat_stash stash, uint64_t ticket,
                                                 void* address, uint64_t offset_bytes,
                                                 uint64_t size_bytes);
/// Without copies: gives memory of the stash for an item, to be filled by the caller, who then
/// calls ziggurat_stash_filled(), or ziggurat_stash_drop(). Gives 0 and NULL if only lent memory
/// that comes back would make room. Errors: those of ziggurat_stash_put().
ZIGGURAT_API ziggurat_status ziggurat_stash_take(ziggurat_stash stash, uint64_t size_bytes,
                                                 uint64_t* ticket, void** address);
/// Ends ziggurat_stash_take(). Never waits; an unknown item is ignored.
ZIGGURAT_API ziggurat_status ziggurat_stash_filled(ziggurat_stash stash, uint64_t ticket);
/// Lends the memory of an item, which the caller may use, and write, until
/// ziggurat_stash_give_back() of the loan's number. An item may be lent several times. Waits until
/// it is in memory. Gives 0 and NULL if half of the stash's memory is lent, or the item is being
/// written: then ziggurat_stash_read() it. Errors: those of ziggurat_stash_read().
ZIGGURAT_API ziggurat_status ziggurat_stash_lend(ziggurat_stash stash, uint64_t ticket,
                                                 uint64_t* loan, void** address);
/// Ends a loan. Never waits; one that has come back is ignored.
ZIGGURAT_API ziggurat_status ziggurat_stash_give_back(ziggurat_stash stash, uint64_t loan);
/// Forgets an item, when calls that read it have ended and what is lent of it came back. Never
/// waits; an unknown item is ignored.
ZIGGURAT_API ziggurat_status ziggurat_stash_drop(ziggurat_stash stash, uint64_t ticket);

/// What a stash has moved and waited for since it was opened.
typedef struct ziggurat_stash_state {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t put_bytes;
  uint64_t written_bytes;        ///< to drives
  uint64_t read_bytes;           ///< from drives
  uint64_t brought_ahead_bytes;  ///< of those, what came before it was needed
  uint64_t memory_peak_bytes;
  double waited_to_put_s;
  double waited_to_read_s;
  uint64_t lent_bytes;
} ziggurat_stash_state;
ZIGGURAT_API ziggurat_status ziggurat_stash_figures(ziggurat_stash stash,
                                                    ziggurat_stash_state* figures);

/// Says what `config`, the text of a config for DeepSpeed, means for a script that trains by
/// itself, as a JSON object. "settings" has ours: {"clip": {"value": 1.0, "path":
/// "gradient_clipping", "assumed": true}}. "handed" has the keys that the script must honour, by
/// DeepSpeed's path and with DeepSpeed's defaults. "given" has the whole config. "notes" has a line
/// for each key that changes nothing. `name` is what messages call the config. `context` is JSON:
/// {"world_size": 2, "settings": ["host_memory"]}, which are the number of ranks and the names of
/// our settings that the script takes in addition to those of DeepSpeed. `text` and `needed_bytes`
/// are as in ziggurat_describe(). Errors: ZIGGURAT_INVALID_ARGUMENT, naming the key.
ZIGGURAT_API ziggurat_status ziggurat_deepspeed_config(const char* config, const char* name,
                                                       const char* context, char* text,
                                                       uint64_t capacity_bytes,
                                                       uint64_t* needed_bytes);

/// What a schedule sets for a step.
typedef struct ziggurat_scheduled_step {
  uint32_t struct_size;
  uint32_t has_betas;  ///< whether it sets the betas too
  double learning_rate;
  double beta1;
  double beta2;
} ziggurat_scheduled_step;
/// Gives the learning rate, and the betas of OneCycle, with which a step is made after `steps`
/// others. `schedule` is a JSON object: "type" is one of DeepSpeed's classes (LRRangeTest,
/// OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR), and the other keys are that class's
/// parameters, all of them. WarmupCosineLR also has "lr", which its ratios multiply. Errors:
/// ZIGGURAT_INVALID_ARGUMENT, naming the key.
ZIGGURAT_API ziggurat_status ziggurat_schedule(const char* schedule, uint64_t steps,
                                               ziggurat_scheduled_step* step);

/// A dynamic loss scale: what it is in the next step, and all that the steps after depend on.
typedef struct ziggurat_loss_scale {
  uint32_t struct_size;
  uint32_t reserved;
  double scale;
  uint64_t hysteresis_left;       ///< which overflow from now on halves it
  uint64_t steps_since_overflow;  ///< since the start if there was none
} ziggurat_loss_scale;
/// Ends a step, which was skipped if `overflow` is not 0. `settings` is a JSON object with the keys
/// of DeepSpeed's "fp16" that the scale follows: "loss_scale_window", "hysteresis",
/// "consecutive_hysteresis" and "min_loss_scale"; and "ends_at_minimum", whether an overflow at the
/// minimum is an error. Errors: ZIGGURAT_NOT_FINITE for such an overflow, which changes nothing;
/// ZIGGURAT_INVALID_ARGUMENT, naming the key.
ZIGGURAT_API ziggurat_status ziggurat_update_loss_scale(const char* settings, int32_t overflow,
                                                        ziggurat_loss_scale* scale);

/// Predicts what a training holds and how long its step takes, for any model, machine and strategy.
/// Nothing is opened or allocated. `request` is a JSON object, or a list of them that is answered
/// by a list:
///
///   "model"       a published name ("llama-3-8b"), a path of a config.json, or sizes
///   "machine"     a name ("h100x8") or the path of a JSON file; without it no time
///   "layout"      "dp", "tp", "pp", "ep", "stage", and homes "params" and "optimizer"
///   "recipe"      bytes of "param", "gradient", "master" and "moments"
///   "sequence", "micro_batch", "micro_batches", "recompute": "nothing", "selective" or "full", ..
///
/// The text has "parameters", "memory" (what is resident at each instant of a step, in bytes, line
/// by line) and "time" (seconds, by what takes them, and the bound). With "gpus" in place of
/// "layout" the usual strategies are compared, and the text has "strategies", "recommended",
/// "second" (the next choice by the same rule, if there is one), "answer" and "decision", as
/// `ziggurat plan --machine --json` writes them. A request that has "machine" alone is answered by
/// that machine's room: "gpus" of a node, "device_bytes" of each, "host_bytes", "drive_bytes", and
/// what a plan leaves free of them. `text` and `needed_bytes` are as in ziggurat_describe().
ZIGGURAT_API ziggurat_status ziggurat_plan(const char* request, char* text, uint64_t capacity_bytes,
                                           uint64_t* needed_bytes);

/// Says how an engine that makes a new store of these parameters and `settings` divides
/// `host_bytes` of memory (its "host_memory", which is not looked at in `settings`), or what it
/// takes by itself if that is 0. `kind` is that of the memory to which streamed parameters are
/// brought: ZIGGURAT_HOST_MEMORY or ZIGGURAT_CUDA_MEMORY. Nothing is opened or written, and no
/// address is followed. The text is a JSON object of whole numbers:
///
///   "budget_bytes"    `host_bytes`, or what the engine takes by itself
///   "smallest_bytes"  the least that works; if "budget_bytes" is more, the least for its records,
///                     which are the smaller the less memory there is
///   "all_bytes"       with so much all records stay, so that a step reads none
///   "records"         how many records the store has
///   "item_bytes"      the most that one of them takes while it is updated
///   "items"           how many are updated at a time
///   "read_bytes"      what a step reads of those that do not stay
///   "store_bytes"     the store's file: records in each of its slots, tables and blobs
///   "params_file_bytes", "sums_file_bytes"
///                     files without names of streamed parameters and of sums of gradients, where
///                     these are on NVMe
///
/// With too little memory all from "item_bytes" on are 0. `text` and `needed_bytes` are as in
/// ziggurat_describe(). Errors: ZIGGURAT_INVALID_ARGUMENT for wrong parameters or settings.
ZIGGURAT_API ziggurat_status ziggurat_plan_host_memory(const ziggurat_param* params, uint64_t count,
                                                       const char* settings, uint64_t host_bytes,
                                                       int32_t kind, char* text,
                                                       uint64_t capacity_bytes,
                                                       uint64_t* needed_bytes);

#ifdef __cplusplus
}
#endif

#endif  // ZIGGURAT_H
