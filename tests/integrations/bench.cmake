# The benchmark: its judgement in the test's process, the whole of it as a child.
if(TARGET ziggurat_bench AND TARGET ziggurat)
  ziggurat_test(bench_parts_test
    SOURCES bench_fill_test.cc bench_verdict_test.cc bench_result_test.cc
    USES ziggurat::bench nlohmann_json::nlohmann_json)
  ziggurat_test(bench_command_test
    SOURCES bench_command_test.cc cli_process.h cli_process.cc
    USES ziggurat::cli nlohmann_json::nlohmann_json
    LABELS multiprocess)
  target_compile_definitions(bench_command_test PRIVATE ZIGGURAT_BINARY="$<TARGET_FILE:ziggurat>")
  add_dependencies(bench_command_test ziggurat)
endif()
