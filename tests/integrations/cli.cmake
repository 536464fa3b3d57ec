# The command `ziggurat`: parts of it in the test's process, the whole of it as a child.
ziggurat_test(deepspeed_config_test SOURCES deepspeed_config_test.cc USES ziggurat::deepspeed)
target_compile_definitions(deepspeed_config_test PRIVATE ZIGGURAT_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
if(TARGET ziggurat)
  ziggurat_test(cli_parts_test SOURCES cli_settings_test.cc cli_lost_store_test.cc cli_report_test.cc
    USES ziggurat::cli nlohmann_json::nlohmann_json)
  target_compile_definitions(cli_parts_test PRIVATE ZIGGURAT_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  # Those apart run once more on other I/O paths, or for long.
  set(cli_command cli_command_test.cc)
  set(cli_bits cli_bits_test.cc)
  set(cli_kill cli_kill_test.cc)
  set(cli_lines cli_lines_test.cc)
  set(cli_run cli_auto_test.cc cli_launch_test.cc cli_plan_test.cc cli_ranks_test.cc cli_reading_test.cc cli_schedule_test.cc cli_signals_test.cc
    cli_simulate_test.cc cli_tensor_test.cc cli_world_test.cc profile_command_test.cc)
  set(cli_stores cli_checkpoint_test.cc cli_checkpoint_faults_test.cc cli_load_test.cc cli_reshard_test.cc cli_resume_test.cc
    cli_stored_test.cc)
  foreach(part command bits kill lines run stores)
    ziggurat_test(cli_${part}_test
      SOURCES ${cli_${part}} cli_process.h cli_process.cc ../support/loop_filesystem.h ../support/loop_filesystem.cc
      USES ziggurat::cli nlohmann_json::nlohmann_json
      LABELS multiprocess)
    target_compile_definitions(cli_${part}_test PRIVATE ZIGGURAT_BINARY="$<TARGET_FILE:ziggurat>")
    add_dependencies(cli_${part}_test ziggurat)
  endforeach()
  # The command starts where oneDNN and CUDA's runtime are not: it opens them when they are used, or has them in it.
  add_test(NAME cli_links_little COMMAND sh -c "! ldd $<TARGET_FILE:ziggurat> | grep -E 'libdnnl|libgomp|libcuda|libnccl'")
  set_tests_properties(cli_links_little PROPERTIES LABELS unit TIMEOUT 60)
  # Over a network that can be cut, where the kernel lets us make one.
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  add_test(NAME cli_two_hosts
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cli_two_hosts_test.py $<TARGET_FILE:ziggurat>)
  add_test(NAME cli_own_names
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cli_own_names_test.py $<TARGET_FILE:ziggurat>)
  set_tests_properties(cli_two_hosts cli_own_names PROPERTIES LABELS multiprocess COST 60 TIMEOUT 600 SKIP_RETURN_CODE 77)
  # Under launchers of others, where they are installed.
  set(launchers torchrun srun)
  if(NOT ZIGGURAT_SANITIZE MATCHES "thread")  # it reports Open MPI's own locks
    list(APPEND launchers mpirun)
  endif()
  foreach(launcher ${launchers})
    add_test(NAME cli_under_${launcher}
      COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cli_launchers_test.py $<TARGET_FILE:ziggurat> ${launcher})
    set_tests_properties(cli_under_${launcher} PROPERTIES LABELS multiprocess COST 30 TIMEOUT 600 SKIP_RETURN_CODE 77)
  endforeach()
  # Its sums are checked before anything is timed.
  add_test(NAME cli_bench_collectives_nccl
    COMMAND ziggurat bench collectives --back-end nccl --largest 16MiB --rounds 2)
  set_tests_properties(cli_bench_collectives_nccl PROPERTIES LABELS "gpu" TIMEOUT 300
    SKIP_REGULAR_EXPRESSION "there is no GPU:|NCCL needs a GPU for each|built without NCCL|libnccl[^ ]*: cannot open")
  # Beside DeepSpeed and PyTorch, where Python has them.
  add_test(NAME cli_checkpoint_peers
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cli_checkpoint_peers_test.py $<TARGET_FILE:ziggurat>)
  set_tests_properties(cli_checkpoint_peers PROPERTIES LABELS multiprocess COST 20 TIMEOUT 600 SKIP_RETURN_CODE 77)
  add_test(NAME cli_schedule_peers
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cli_schedule_peers_test.py $<TARGET_FILE:ziggurat>)
  set_tests_properties(cli_schedule_peers PROPERTIES LABELS multiprocess TIMEOUT 600 SKIP_RETURN_CODE 77)
endif()
