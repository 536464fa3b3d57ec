/* SPDX-License-Identifier: Apache-2.0 */
/* tests/integrations/c/embedded_trainer.c: a trainer in plain C: fits y = w x + b, and prints it.
 *
 *   embedded_trainer DIRECTORY
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

static ziggurat_param param(const char* name, float* value) {
  ziggurat_param its = ZIGGURAT_INIT(ziggurat_param);
  its.name = name;
  its.values = memory(value, 1);
  return its;
}

int main(int argc, char** argv) {
  float w = 0, b = 0;
  char settings[4096];
  if (argc != 2) return 2;
  snprintf(settings, sizeof settings, "{\"store\": \"%s\", \"betas\": [0.9, 0.99]}", argv[1]);

  ziggurat_runtime runtime;
  ziggurat_engine engine;
  const ziggurat_param params[] = {param("w", &w), param("b", &b)};
  CHECK(ziggurat_runtime_create("{\"threads\": 1}", &runtime));
  CHECK(ziggurat_engine_open(runtime, params, 2, settings, &engine));

  for (int step = 0; step < 300; ++step) {
    float gradient_w = 0, gradient_b = 0;
    for (int i = -5; i <= 5; ++i) { /* of the mean of (w x + b - (2 x - 1))^2 */
      const float x = (float)i / 5;
      const float error = w * x + b - (2 * x - 1);
      gradient_w += 2 * error * x / 11;
      gradient_b += 2 * error / 11;
    }
    const ziggurat_memory of_w = memory(&gradient_w, 1), of_b = memory(&gradient_b, 1);
    CHECK(ziggurat_lend_gradient(engine, 0, &of_w, 1));
    CHECK(ziggurat_lend_gradient(engine, 1, &of_b, 1));

    ziggurat_group group = ZIGGURAT_INIT(ziggurat_group);
    group.learning_rate = 0.05F, group.beta1 = 0.9F, group.beta2 = 0.99F, group.eps = 1e-8F;
    ziggurat_step_options options = ZIGGURAT_INIT(ziggurat_step_options);
    options.groups = &group, options.group_count = 1;
    ziggurat_step_result result = ZIGGURAT_INIT(ziggurat_step_result);
    CHECK(ziggurat_step(engine, &options, &result));
    CHECK(ziggurat_wait(engine, ZIGGURAT_ALL_PARAMS));
  }
  CHECK(ziggurat_make_durable(engine));
  CHECK(ziggurat_engine_close(engine));
  CHECK(ziggurat_runtime_destroy(runtime));
  printf("y = %.3f x %+.3f\n", (double)w, (double)b);
  return 0;
}
