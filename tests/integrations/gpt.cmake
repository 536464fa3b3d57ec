# The reference trainer.
add_library(ziggurat_test_ram_engine STATIC ${PROJECT_SOURCE_DIR}/tests/support/ram_engine.cc)
target_link_libraries(ziggurat_test_ram_engine PUBLIC ziggurat::test_support ziggurat::gpt)

ziggurat_test(gpt_data_test SOURCES gpt_core_rates_test.cc gpt_model_test.cc gpt_text_test.cc USES ziggurat::gpt)
ziggurat_test(gpt_compute_test
  SOURCES gpt_kernels_test.cc gpt_matmul_test.cc gpt_gradient_test.cc gpt_trainer_test.cc
  USES ziggurat_test_ram_engine)
ziggurat_test(gpt_tensor_test
  SOURCES gpt_tensor_test.cc ../collectives/tcp_ranks.cc
  USES ziggurat_test_ram_engine ziggurat::engine ziggurat::collectives fmt::fmt)
ziggurat_test(rehearsal_links_test
  SOURCES rehearsal_links_test.cc ../collectives/tcp_ranks.cc
  USES ziggurat_test_ram_engine ziggurat::rehearsal ziggurat::engine ziggurat::collectives nlohmann_json::nlohmann_json fmt::fmt)

# Once more as on a CPU without bf16 products: oneDNN is told to use no more than AVX2.
add_test(NAME gpt_compute_test_without_bf16 COMMAND gpt_compute_test)
set_tests_properties(gpt_compute_test_without_bf16 PROPERTIES LABELS unit TIMEOUT 600
  ENVIRONMENT "ONEDNN_MAX_CPU_ISA=AVX2")
