// SPDX-License-Identifier: Apache-2.0
// integrations/device_mlp/main.cc: the program `device_mlp`: reads its flags, and prints an error
// as one line.
#include <CLI/CLI.hpp>
#include <iostream>

#include "base/error.h"
#include "integrations/device_mlp/program.h"

namespace {

using ziggurat::device_mlp::ProgramOptions;

void add_size(CLI::App& app, const char* flag, std::uint64_t& size_bytes, const char* help) {
  app.add_option_function<std::string>(
         flag,
         [&size_bytes, flag](const std::string& text) {
           size_bytes = ziggurat::parse_size(text, flag);
         },
         help)
      ->default_str(ziggurat::exact_bytes(size_bytes));
}

}  // namespace

int main(int argc, char** argv) {
  ProgramOptions options;
  CLI::App app{
      "Trains a small language model over bytes, all of whose layers run on the device: an example "
      "of the engine's calls. The same flags print the same bits on a GPU and on the host."};
  app.option_defaults()->always_capture_default();
  app.add_option("--text", options.text_path, "a file of text to learn")->required();
  app.add_option("--device", options.device,
                 "cuda:N, host (emulated), or auto, which takes cuda:0 if there is a GPU");
  app.add_option("--store", options.store,
                 "directory of the optimizer's state, from which a run resumes");
  app.add_option("--placement", options.placement,
                 "tier of each class (device, host or nvme), or all=TIER, or auto");
  add_size(app, "--device-memory", options.device_memory_bytes, "budget of device memory");
  add_size(app, "--host-memory", options.host_memory_bytes, "budget of host memory");
  app.add_option("--steps", options.steps, "number of steps, including those of earlier runs");
  app.add_option("--learning-rate", options.learning_rate, "of every step");
  app.add_option("--rows", options.shape.rows, "number of guesses in a step")
      ->check(CLI::PositiveNumber);
  app.add_option("--context", options.shape.context, "number of bytes that a guess is made from")
      ->check(CLI::PositiveNumber);
  app.add_option("--width", options.shape.width, "number of values that stand for a byte")
      ->check(CLI::PositiveNumber);
  app.add_option("--hidden", options.shape.hidden, "width of the hidden layer")
      ->check(CLI::PositiveNumber);
  try {
    app.parse(argc, argv);
    train(options, std::cout);
    return 0;
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const std::exception& error) {
    std::cerr << "device_mlp: " << error.what() << '\n';
    return 1;
  }
}
