// SPDX-License-Identifier: Apache-2.0
// integrations/c/ziggurat.h: the engine for trainers written in anything: plain C, no C++ types.
//
// An embedder computes, and has parameters and gradients in memory of its own; the engine keeps
// masters and moments in host memory or on NVMe, reads gradients and writes new parameters where
// they are, on the CPU.
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
// Several processes may be ranks of one job (ziggurat_runtime_create()). Each then opens an engine
// of its own pieces of the parameters, of whatever shape, and the ranks exchange gradients and
// parameters themselves, with ziggurat_exchange_open() or anything else. The engines keep them at
// one step: all make it or none does, and a crash leaves all at the same one. Engines and exchanges
// of a runtime are opened in the same order on every rank.
//
// Every call returns a status; ziggurat_last_error() says in words what the last one that failed on
// this thread had against it. A handle that is not there, a parameter that the model does not have,
// a size that does not fit: each is an error, and nothing changes. Calls may come from any thread;
// those of one engine are made one after the other. C99 or later. Structs begin with their size, as
// the caller was compiled: set it with ZIGGURAT_INIT, which also clears the rest.
//
// An engine that has failed (a drive, another rank) says so in the next call that lends it
// something, asks it for state or waits for it, and in every later one. When such a call returns,
// all memory that the engine was lent is the caller's again, gradients and parameters: nothing
// reads or writes it any more.
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

/// What the caller does next.
typedef int32_t ziggurat_status;
enum {
  ZIGGURAT_OK = 0,
  ZIGGURAT_INVALID_ARGUMENT = 1,    ///< fix the call or the settings
  ZIGGURAT_RESOURCE_EXHAUSTED = 2,  ///< free something, or give a larger budget
  ZIGGURAT_UNAVAILABLE = 3,         ///< the file or device is gone or in use
  ZIGGURAT_DEADLINE_EXCEEDED = 4,   ///< waited as long as was allowed
  ZIGGURAT_DATA_LOSS = 5,           ///< the store is damaged: restore it
  ZIGGURAT_CANCELLED = 6,           ///< somebody asked to stop
  ZIGGURAT_UNIMPLEMENTED = 7,       ///< take the other path
  ZIGGURAT_INTERNAL = 8,            ///< a fault of the engine's
  ZIGGURAT_NOT_FINITE = 9           ///< the gradients' norm is not: skip the step
};

typedef int32_t ziggurat_dtype;
enum { ZIGGURAT_FP32 = 0, ZIGGURAT_BF16 = 1, ZIGGURAT_FP16 = 2 };

/// 0 is never one. A handle is not used again after its object is gone.
typedef uint64_t ziggurat_runtime;
typedef uint64_t ziggurat_engine;
typedef uint64_t ziggurat_exchange;
typedef uint64_t ziggurat_checkpoint;

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

/// Elements in the caller's memory, contiguous.
typedef struct ziggurat_memory {
  uint32_t struct_size;
  ziggurat_dtype dtype;
  void* address;
  uint64_t size_bytes;
} ziggurat_memory;

typedef struct ziggurat_param {
  uint32_t struct_size;
  uint32_t group;          ///< whose settings each step uses: of ziggurat_step_options
  const char* name;        ///< of its own in the model
  const int64_t* shape;    ///< `dimensions` of them
  uint32_t dimensions;     ///< 0: one element
  uint32_t reserved;       ///< 0
  ziggurat_memory values;  ///< the parameter, lent to the engine until it is closed: what a new
                           ///< store's masters are made from
} ziggurat_param;

/// Bits of ziggurat_group.flags.
enum {
  ZIGGURAT_NESTEROV = 1,  ///< SGD: the update is gradient + beta1 * momentum, not the momentum
  ZIGGURAT_MAXIMIZE = 2   ///< up the gradient; decay still goes towards zero
};

/// What a step does to the parameters of one group.
typedef struct ziggurat_group {
  uint32_t struct_size;
  float learning_rate;
  float beta1;  ///< SGD: the momentum
  float beta2;
  float eps;
  float weight_decay;
  float lr_decay;  ///< a parameter's step t has learning_rate / (1 + (t - 1) * lr_decay)
  float
      dampening;  ///< SGD: the share of a gradient that the momentum leaves out; of the first, none
  uint32_t flags;  ///< of ZIGGURAT_NESTEROV and ZIGGURAT_MAXIMIZE
} ziggurat_group;

/// The blob is given after the step, by ziggurat_give_blob(); until then the step is not durable,
/// and neither ziggurat_step() nor ziggurat_make_durable() is called.
#define ZIGGURAT_BLOB_FOLLOWS 1u
/// ziggurat_step() returns only when every parameter is updated whose state is in memory. For a
/// caller that computes on the same cores: a forward beside updates is slowed down by both.
#define ZIGGURAT_UPDATE_AT_ONCE 2u

typedef struct ziggurat_step_options {
  uint32_t struct_size;
  uint32_t group_count;          ///< one more than the largest ziggurat_param.group
  const ziggurat_group* groups;  ///< an array of them
  float grad_scale;     ///< multiplies every gradient, beside its own scale; 0: nothing does
  uint32_t flags;       ///< of ZIGGURAT_BLOB_FOLLOWS and ZIGGURAT_UPDATE_AT_ONCE
  const void* blob;     ///< the caller's own state, copied, made durable with this step
  uint64_t blob_bytes;  ///< at most 1 MiB
} ziggurat_step_options;

typedef struct ziggurat_step_result {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t generation;  ///< finished steps
} ziggurat_step_result;

typedef struct ziggurat_state {
  uint32_t struct_size;
  int32_t resumed;              ///< 1: open found a store and went on from it
  uint64_t generation;          ///< finished steps
  uint64_t durable_generation;  ///< the newest that a crash leaves
  uint64_t blob_bytes;          ///< of the generation that open resumed at
} ziggurat_state;

/// The ABI of the library at hand, and its version: "0.1.0".
ZIGGURAT_API int32_t ziggurat_abi_version(void);
ZIGGURAT_API const char* ziggurat_version(void);

/// The message of this thread's last call that failed; "" if none has. It stays until the next one
/// that fails.
ZIGGURAT_API const char* ziggurat_last_error(void);
/// The same for a binding that has words of its own: settings have the engine's names, in backticks
/// (`resume=auto`), and what this interface has nothing for is advised too.
ZIGGURAT_API const char* ziggurat_last_error_in_settings(void);

/// Workers and the thread that decides; engines share them. `settings` is a JSON object, or null:
///
///   "threads"              workers; absent or 0: as many as this process's share of the machine
///   "rank", "world_size"   this process is one of several; absent: it is alone, whatever a
///                          launcher's variables say. What follows is for several
///   "rendezvous"           "HOST:PORT": an address of rank 0's machine, which listens there until
///                          all have come
///   "secret"               a text that all ranks know; may be absent where all are on this host
///   "connect_timeout_s"    for all to come; 300
///   "call_timeout_s"       what ends the job if no rank has finished any work meanwhile; 600
///
/// Waits for all ranks. Errors: ZIGGURAT_DEADLINE_EXCEEDED, naming the ranks that did not come.
ZIGGURAT_API ziggurat_status ziggurat_runtime_create(const char* settings,
                                                     ziggurat_runtime* runtime);
/// Errors: ZIGGURAT_INVALID_ARGUMENT while an engine or an exchange is open on it.
ZIGGURAT_API ziggurat_status ziggurat_runtime_destroy(ziggurat_runtime runtime);

/// Opens or creates the state of `count` parameters. `settings` is a JSON object: "store" (a
/// directory, or a list of them; may be absent with "placement": "optimizer=host", and then nothing
/// is ever durable), "run" (a text that names the model as a whole, its data and the like: all
/// ranks and a store that is resumed must have the same), "first_elements" (where the parameters
/// are slices of those that have their names: a list with the number of each one's first element in
/// the whole, which keys stochastic rounding), and the engine's settings by the names that
/// `ziggurat train --help` has, with underscores. Without "host_memory" as much is taken as a run
/// uses well. With "progress": true an opening of over two seconds says on standard error how far
/// it is. Where a store is resumed, the parameters are written.
ZIGGURAT_API ziggurat_status ziggurat_engine_open(ziggurat_runtime runtime,
                                                  const ziggurat_param* params, uint64_t count,
                                                  const char* settings, ziggurat_engine* engine);
/// The parameters that this rank has in the store of `settings`, in the order and with the names
/// that open must be given to go on from it: a JSON array of {"name", "shape", "dtype"}, "[]" where
/// there is no store. Nothing is locked or written. `text` and `needed_bytes` as in
/// ziggurat_describe(). Errors: ZIGGURAT_DATA_LOSS for a file that says nothing any more.
ZIGGURAT_API ziggurat_status ziggurat_stored_params(ziggurat_runtime runtime, const char* settings,
                                                    char* text, uint64_t capacity_bytes,
                                                    uint64_t* needed_bytes);
/// State that is not durable is lost: call ziggurat_make_durable() before.
ZIGGURAT_API ziggurat_status ziggurat_engine_close(ziggurat_engine engine);

/// What ranks exchange among themselves, from host memory to host memory, beside what their engines
/// say. All ranks open it, at the same place among their engines and exchanges, by the same name;
/// on one rank it works too. Calls may come from any thread; on every rank they begin in the same
/// order, with the same sizes, and several may be under way. Their memory is the exchange's from
/// begin to ziggurat_finish(). After an error other than ZIGGURAT_INVALID_ARGUMENT of begin itself
/// nothing more is exchanged on this runtime, nor do its engines make another step: a rank that
/// ends fails the calls of all others with ZIGGURAT_UNAVAILABLE, which name it and the call.
ZIGGURAT_API ziggurat_status ziggurat_exchange_open(ziggurat_runtime runtime, const char* name,
                                                    ziggurat_exchange* exchange);
/// Waits for what is under way.
ZIGGURAT_API ziggurat_status ziggurat_exchange_close(ziggurat_exchange exchange);
/// Slice r of `input` goes to rank r, slice r of `output` comes from it: `slice_bytes` each. The
/// two do not overlap.
ZIGGURAT_API ziggurat_status ziggurat_begin_all_to_all(ziggurat_exchange exchange,
                                                       const void* input, void* output,
                                                       uint64_t slice_bytes, uint64_t* ticket);
/// Slice r of `output` is rank r's `input`, which may lie there already.
ZIGGURAT_API ziggurat_status ziggurat_begin_all_gather(ziggurat_exchange exchange,
                                                       const void* input, void* output,
                                                       uint64_t input_bytes, uint64_t* ticket);
/// Replaces `values` by their sums over the ranks, added in the order of ranks, so that all ranks
/// get the same bits. For a few values.
ZIGGURAT_API ziggurat_status ziggurat_begin_all_reduce_doubles(ziggurat_exchange exchange,
                                                               double* values, uint64_t count,
                                                               uint64_t* ticket);
ZIGGURAT_API ziggurat_status ziggurat_begin_barrier(ziggurat_exchange exchange, uint64_t* ticket);
/// Waits for the call of that ticket; once for each.
ZIGGURAT_API ziggurat_status ziggurat_finish(ziggurat_exchange exchange, uint64_t ticket);

/// Lends the gradient of parameter `param` (its index in open's array) in the step to come, which
/// is multiplied by `scale`; in place of one that it has. Of any type. The memory is the caller's
/// again after ziggurat_wait() for the parameter, or ziggurat_discard_gradients(). A parameter
/// without a gradient is left alone by the step: no decay, and it counts no step.
ZIGGURAT_API ziggurat_status ziggurat_lend_gradient(ziggurat_engine engine, uint64_t param,
                                                    const ziggurat_memory* gradient, float scale);
/// The same for `count` parameters in one call: gradient i is of parameter `params[i]`, has as many
/// elements, of type `dtypes[i]`, at `addresses[i]`, and is multiplied by `scales[i]`. `dtypes` may
/// be null where all are fp32, `scales` where nothing multiplies them. One that is wrong is an
/// error that names it, and none is lent.
ZIGGURAT_API ziggurat_status ziggurat_lend_gradients(ziggurat_engine engine, uint64_t count,
                                                     const uint64_t* params, void* const* addresses,
                                                     const ziggurat_dtype* dtypes,
                                                     const float* scales);
/// Adds to it, for steps of several backwards: in fp32, in memory of the engine's. The gradients of
/// both calls are the caller's again when this returns.
ZIGGURAT_API ziggurat_status ziggurat_add_gradient(ziggurat_engine engine, uint64_t param,
                                                   const ziggurat_memory* gradient, float scale);
/// No parameter has a gradient in the step to come.
ZIGGURAT_API ziggurat_status ziggurat_discard_gradients(ziggurat_engine engine);
/// The 2-norm of all gradients of the step to come, each times its scale; infinite or NaN where one
/// is not finite. A caller that clips gives the step min(1, limit / norm) as its grad_scale; one
/// that scales its loss discards what is not finite.
ZIGGURAT_API ziggurat_status ziggurat_gradient_norm(ziggurat_engine engine, double* norm);
/// Gradients of the step to come are being computed: the engine may read records meanwhile.
ZIGGURAT_API ziggurat_status ziggurat_expect_gradients(ziggurat_engine engine);

/// The caller has moved the parameter: it is at `values` now, with the same content. Waits for an
/// update that is under way.
ZIGGURAT_API ziggurat_status ziggurat_lend_param(ziggurat_engine engine, uint64_t param,
                                                 const ziggurat_memory* values);
/// The caller has written the parameter: before the next step its master is taken anew from it; its
/// moments stay.
ZIGGURAT_API ziggurat_status ziggurat_param_written(ziggurat_engine engine, uint64_t param);

/// Makes a step of all gradients and returns: parameters are written from now on, until
/// ziggurat_wait() for them returns. Errors: ZIGGURAT_INVALID_ARGUMENT for settings that make no
/// step; nothing was changed then, and the gradients are still those of the step to come. After any
/// other error the engine has ended. Among several ranks all make each step, those too that have no
/// gradient: if one refuses it, none makes it, and the error of all names that one. Averaging and
/// clipping are the callers', and so are groups' settings, which are not compared.
ZIGGURAT_API ziggurat_status ziggurat_step(ziggurat_engine engine,
                                           const ziggurat_step_options* options,
                                           ziggurat_step_result* result);
/// In place of a parameter's index.
#define ZIGGURAT_ALL_PARAMS UINT64_MAX
/// Waits until the parameter is that of the newest step.
ZIGGURAT_API ziggurat_status ziggurat_wait(ziggurat_engine engine, uint64_t param);
/// The blob of the newest step, which was made with ZIGGURAT_BLOB_FOLLOWS.
ZIGGURAT_API ziggurat_status ziggurat_give_blob(ziggurat_engine engine, const void* blob,
                                                uint64_t blob_bytes);
/// Steps that the parameter has made.
ZIGGURAT_API ziggurat_status ziggurat_param_steps(ziggurat_engine engine, uint64_t param,
                                                  uint64_t* steps);

/// The names of what the optimizer keeps of a parameter, a line each, ending in a zero: "master",
/// then its moments as torch.optim calls them. `text` and `needed_bytes` as in ziggurat_describe().
ZIGGURAT_API ziggurat_status ziggurat_state_names(ziggurat_engine engine, char* text,
                                                  uint64_t capacity_bytes, uint64_t* needed_bytes);
/// Copies the parameter's array `name` of the newest step to `values`, fp32, as many elements as it
/// has. Waits for that step's update of it.
ZIGGURAT_API ziggurat_status ziggurat_read_state(ziggurat_engine engine, uint64_t param,
                                                 const char* name, const ziggurat_memory* values);
/// The array is what `values` has, fp32, copied and rounded to nearest as the state's format has
/// it; the next step goes on from it, and gives the caller's parameter the value of a master that
/// was written. What is written between two steps becomes durable with the second one, as a whole;
/// until then it takes memory. Of a master and a parameter that were both written
/// (ziggurat_param_written()) the later one counts.
ZIGGURAT_API ziggurat_status ziggurat_write_state(ziggurat_engine engine, uint64_t param,
                                                  const char* name, const ziggurat_memory* values);
/// The parameters, or parts of them, that `rank` has, which may be this rank: one a line, its
/// number of elements, a tab and its name. `text` and `needed_bytes` as in ziggurat_describe().
ZIGGURAT_API ziggurat_status ziggurat_pieces_of(ziggurat_engine engine, int32_t rank, char* text,
                                                uint64_t capacity_bytes, uint64_t* needed_bytes);
/// As ziggurat_read_state(), for the parameter of that name that `rank` has, as of this rank's
/// newest step, with what was written there since. Nothing is called there: that rank's program may
/// compute, sleep, or wait in ziggurat_step(). It cannot make another step meanwhile, since every
/// step is made by all ranks. Errors: ZIGGURAT_UNAVAILABLE where it has closed its engine.
ZIGGURAT_API ziggurat_status ziggurat_read_state_of(ziggurat_engine engine, int32_t rank,
                                                    const char* param, const char* name,
                                                    const ziggurat_memory* values);
/// Sets the number of steps that the parameter has made; durable with the next step.
ZIGGURAT_API ziggurat_status ziggurat_set_param_steps(ziggurat_engine engine, uint64_t param,
                                                      uint64_t steps);

typedef struct ziggurat_save_options {
  uint32_t struct_size;
  uint32_t engine_count;           ///< at least 1
  const ziggurat_engine* engines;  ///< of the runtime, whose state is saved
  const ziggurat_memory* values;   ///< an array of what is saved beside it
  uint64_t value_count;
  const void* blob;  ///< the caller's own state; rank 0's is kept
  uint64_t blob_bytes;
} ziggurat_save_options;

/// Writes a checkpoint of the engines' newest step, with what was written since, and of `values`,
/// into FOLDER/step-NNNNNNNNN: safetensors shards, and a manifest with the hash of every byte. A
/// chunk of state is in memory at a time. Returns when it is durable under its name. All ranks of
/// the runtime call it, at the same place among their engines and exchanges; each writes its part,
/// rank 0 commits. `content` is a JSON object, alike on every rank but for "engines" and "values":
///
///   "folder", "step"       where it is written
///   "keep_last", "keep_every"  which of its line of history stay in the folder then; 0: all
///   "keep_best"            and the one of the "step" in resume's "best_metric"; absent: false
///   "model", "dtype", "placement"  what it is called, the type of its parameters, where state is
///   "resume"               an object: what a run says of itself, by the names that
///                          `ziggurat ckpt verify` asks for
///   "params"               a list: {"name", "shape", "trained"}, of every parameter of the model,
///                          as a whole; {"dtype"} of one that is not trained: values of any kind
///   "engines"              for each engine a list: what each of its parameters is of "params":
///                          {"param": INDEX, "first": ELEMENT}, elements that follow one another,
///                          or {"param": INDEX, "offsets": [..], "box": [..]}; null: another rank
///                          saves it
///   "values"               the same of each of options.values
///   "widened"              moments of 8 bits are saved as the fp32 values that they stand for, as
///                          several ranks' always are; absent: false
///   "alone"                this rank calls, and the others do whatever they do between two steps;
///                          absent: false
///   "others"               of a rank that is alone, a list of what the others' engines have:
///                          {"engine", "rank", "name", "param", "first", "count"}, as
///                          ziggurat_read_state_of() reads it: an array of one is in memory
///
/// Together the ranks have all of each parameter, and none of it twice. Errors:
/// ZIGGURAT_INVALID_ARGUMENT where this step's checkpoint is there already;
/// ZIGGURAT_RESOURCE_EXHAUSTED for a full disk; no checkpoint is there after an error.
ZIGGURAT_API ziggurat_status ziggurat_save_checkpoint(ziggurat_runtime runtime,
                                                      const ziggurat_save_options* options,
                                                      const char* content);
/// The checkpoint `path`, or the newest whole one in that folder, whoever saved it.
ZIGGURAT_API ziggurat_status ziggurat_checkpoint_open(ziggurat_runtime runtime, const char* path,
                                                      ziggurat_checkpoint* checkpoint);
ZIGGURAT_API ziggurat_status ziggurat_checkpoint_close(ziggurat_checkpoint checkpoint);
/// A JSON object: "directory", "step", "model", "dtype", "optimizer" (null: weights alone),
/// "state_format", "resume", "blob_bytes", and "tensors": [name, owner, array, type, shape] each.
/// `text` and `needed_bytes` as in ziggurat_describe().
ZIGGURAT_API ziggurat_status ziggurat_checkpoint_content(ziggurat_checkpoint checkpoint, char* text,
                                                         uint64_t capacity_bytes,
                                                         uint64_t* needed_bytes);
/// Copies the blob, "blob_bytes" of it.
ZIGGURAT_API ziggurat_status ziggurat_checkpoint_blob(ziggurat_checkpoint checkpoint, void* blob,
                                                      uint64_t capacity_bytes);
/// Elements of tensor `tensor` from `first` on, as many as `values` has: in its own type, or
/// widened to fp32. Every byte was compared with its hash. Errors: ZIGGURAT_DATA_LOSS naming the
/// file and the tensor.
ZIGGURAT_API ziggurat_status ziggurat_checkpoint_read(ziggurat_checkpoint checkpoint,
                                                      uint64_t tensor, uint64_t first,
                                                      const ziggurat_memory* values);
/// ziggurat_engine_open() of a new store whose state is the checkpoint's, converted where the
/// formats differ, a chunk at a time. The parameters are written, as where a store is resumed: each
/// gets its master, rounded to its type. `load` is a JSON object: "parts", for each parameter null
/// or what it is of the checkpoint's: {"name", "shape"} of the whole, and "first" or "offsets" and
/// "box" as above; "steps", which each has made; "weights_only": masters alone, at step 0. A
/// parameter that has no master there keeps its values, and its master is made from them; moments
/// that are not there begin anew.
ZIGGURAT_API ziggurat_status ziggurat_engine_load(ziggurat_runtime runtime,
                                                  const ziggurat_param* params, uint64_t count,
                                                  const char* settings,
                                                  ziggurat_checkpoint checkpoint, const char* load,
                                                  ziggurat_engine* engine);

/// Returns when every finished step is durable.
ZIGGURAT_API ziggurat_status ziggurat_make_durable(ziggurat_engine engine);
ZIGGURAT_API ziggurat_status ziggurat_engine_state(ziggurat_engine engine, ziggurat_state* state);
/// Copies the blob of the generation that open resumed at, ziggurat_state.blob_bytes of it.
ZIGGURAT_API ziggurat_status ziggurat_read_blob(ziggurat_engine engine, void* blob,
                                                uint64_t capacity_bytes);
/// What open chose and found, a line each, ending in a zero. `needed_bytes`, if not null, is what
/// the whole text takes; `text` may be null.
ZIGGURAT_API ziggurat_status ziggurat_describe(ziggurat_engine engine, char* text,
                                               uint64_t capacity_bytes, uint64_t* needed_bytes);
/// What was moved and waited for so far, a JSON object: "nvme_read_bytes", "optimizer_cpu_ns",
/// "host_used_bytes" and so on. Counters are those of the runtime, which engines may share; their
/// names may change from one version to the next. `text` and `needed_bytes` as above.
ZIGGURAT_API ziggurat_status ziggurat_figures(ziggurat_engine engine, char* text,
                                              uint64_t capacity_bytes, uint64_t* needed_bytes);

/// What `config`, the text of a config for DeepSpeed, means where a script of its own trains, as a
/// JSON object: "settings": ours, {"clip": {"value": 1.0, "path": "gradient_clipping", "assumed":
/// true}}; "handed": the keys that are the script's to honour, by DeepSpeed's path, with its
/// defaults; "given": the whole config; "notes": a line for each key that changes nothing. `name`
/// is what messages call the config. `context` is JSON: {"world_size": 2, "settings":
/// ["host_memory"]}: the ranks, and the names of ours that the script takes beside DeepSpeed's.
/// `text` and `needed_bytes` as in ziggurat_describe(). Errors: ZIGGURAT_INVALID_ARGUMENT, naming
/// the key.
ZIGGURAT_API ziggurat_status ziggurat_deepspeed_config(const char* config, const char* name,
                                                       const char* context, char* text,
                                                       uint64_t capacity_bytes,
                                                       uint64_t* needed_bytes);

#ifdef __cplusplus
}
#endif

#endif  // ZIGGURAT_H
