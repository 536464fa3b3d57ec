# The benchmark: its judgement in the test's process, the whole of it as a child.
if(TARGET ziggurat_measure AND TARGET ziggurat)
  ziggurat_test(measure_parts_test
    SOURCES measure_fill_test.cc measure_verdict_test.cc measure_result_test.cc
    USES ziggurat::measure nlohmann_json::nlohmann_json)
  foreach(part command optimizer)
    ziggurat_test(measure_${part}_test
      SOURCES measure_${part}_test.cc cli_process.h cli_process.cc
      USES ziggurat::cli nlohmann_json::nlohmann_json
      LABELS multiprocess COST 20)
    target_compile_definitions(measure_${part}_test PRIVATE ZIGGURAT_BINARY="$<TARGET_FILE:ziggurat>")
    add_dependencies(measure_${part}_test ziggurat)
  endforeach()
endif()
