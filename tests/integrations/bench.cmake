# The benchmark: its judgement in the test's process, the whole of it as a child.
if(TARGET ziggurat_bench AND TARGET ziggurat)
  ziggurat_test(bench_parts_test
    SOURCES bench_fill_test.cc bench_verdict_test.cc bench_result_test.cc
    USES ziggurat::bench nlohmann_json::nlohmann_json)
  foreach(part command optimizer)
    ziggurat_test(bench_${part}_test
      SOURCES bench_${part}_test.cc cli_process.h cli_process.cc
      USES ziggurat::cli nlohmann_json::nlohmann_json
      LABELS multiprocess)
    target_compile_definitions(bench_${part}_test PRIVATE ZIGGURAT_BINARY="$<TARGET_FILE:ziggurat>")
    add_dependencies(bench_${part}_test ziggurat)
  endforeach()
endif()
