/* SPDX-License-Identifier: Apache-2.0 */
/* tests/integrations/c/streamed_trainer.c: a trainer in plain C whose parameters the engine keeps: fits y = w x + b, and
 * prints it.
 *
 *   streamed_trainer DIRECTORY
 */
#include <stdio.h>

#include <ziggurat.h>

#define CHECK(call)                                              \
  do {                                                           \
    if ((call) != ZIGGURAT_OK) {                                 \
      fprintf(stderr, "%s: %s\n", #call, ziggurat_last_error()); \
      return 1;                                                  \
    }                                                            \
  } while (0)

static ziggurat_memory memory(float* values, uint64_t count) {
  ziggurat_memory its = ZIGGURAT_INIT(ziggurat_memory);
  its.dtype = ZIGGURAT_FP32;
  its.address = values;
  its.size_bytes = count * sizeof(float);
  return its;
}

/* Without an address the engine keeps it; `unit` is what it is acquired with. */
static ziggurat_param param(const char* name, uint32_t unit) {
  ziggurat_param its = ZIGGURAT_INIT(ziggurat_param);
  its.name = name;
  its.unit = unit;
  its.values = memory(NULL, 0);
  return its;
}

int main(int argc, char** argv) {
  char settings[4096];
  if (argc != 2) return 2;
  snprintf(settings, sizeof settings,
           "{\"store\": \"%s\", \"betas\": [0.9, 0.99], \"placement\": \"params=nvme,optimizer=nvme\", "
           "\"device_memory\": \"1MiB\"}",
           argv[1]);

  ziggurat_runtime runtime;
  ziggurat_engine engine;
  const ziggurat_param params[] = {param("w", 0), param("b", 1)};
  CHECK(ziggurat_runtime_create("{\"threads\": 1}", &runtime));
  CHECK(ziggurat_engine_open(runtime, params, 2, settings, &engine));
  ziggurat_state state = ZIGGURAT_INIT(ziggurat_state);
  CHECK(ziggurat_engine_state(engine, &state));
  float begin = 0;
  const ziggurat_memory first = memory(&begin, 1);
  if (!state.resumed) CHECK(ziggurat_write_param(engine, 0, &first));

  for (int step = 0; step < 300; ++step) {
    float gradient_w = 0, gradient_b = 0;
    ziggurat_memory w = ZIGGURAT_INIT(ziggurat_memory), b = ZIGGURAT_INIT(ziggurat_memory);
    CHECK(ziggurat_acquire(engine, 0, NULL));
    CHECK(ziggurat_acquire(engine, 1, NULL));
    CHECK(ziggurat_param_memory(engine, 0, &w));
    CHECK(ziggurat_param_memory(engine, 1, &b));
    for (int i = -5; i <= 5; ++i) { /* of the mean of (w x + b - (2 x - 1))^2 */
      const float x = (float)i / 5;
      const float error = *(float*)w.address * x + *(float*)b.address - (2 * x - 1);
      gradient_w += 2 * error * x / 11;
      gradient_b += 2 * error / 11;
    }
    CHECK(ziggurat_release(engine, 1, NULL));
    CHECK(ziggurat_release(engine, 0, NULL));
    const ziggurat_memory of_w = memory(&gradient_w, 1), of_b = memory(&gradient_b, 1);
    CHECK(ziggurat_add_gradient(engine, 0, &of_w, 1));
    CHECK(ziggurat_add_gradient(engine, 1, &of_b, 1));

    ziggurat_group group = ZIGGURAT_INIT(ziggurat_group);
    group.learning_rate = 0.05F, group.beta1 = 0.9F, group.beta2 = 0.99F, group.eps = 1e-8F;
    ziggurat_step_options options = ZIGGURAT_INIT(ziggurat_step_options);
    options.groups = &group, options.group_count = 1;
    ziggurat_step_result result = ZIGGURAT_INIT(ziggurat_step_result);
    CHECK(ziggurat_step(engine, &options, &result));
  }
  float w = 0, b = 0;
  const ziggurat_memory to_w = memory(&w, 1), to_b = memory(&b, 1);
  CHECK(ziggurat_read_param(engine, 0, &to_w));
  CHECK(ziggurat_read_param(engine, 1, &to_b));
  CHECK(ziggurat_make_durable(engine));
  CHECK(ziggurat_engine_close(engine));
  CHECK(ziggurat_runtime_destroy(runtime));
  printf("y = %.3f x %+.3f\n", (double)w, (double)b);
  return 0;
}
