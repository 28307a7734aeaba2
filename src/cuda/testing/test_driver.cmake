# A CUDA driver on the CPU, for tests: libcuda.so.1 in the build's src/cuda/testing. It exports what the driver
# exports and kt_test_cuda_*, nothing else, and shares no code with what it tests.
file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/test_*.cc)
# The kernels themselves, compiled for the CPU.
file(GLOB kernels CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/../kernels/*.cu
     ${CMAKE_CURRENT_LIST_DIR}/*.cu)
set_source_files_properties(${kernels} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-xc++;-Wno-unused-function")
add_library(test_driver SHARED ${sources} ${kernels})
target_include_directories(test_driver PRIVATE ${PROJECT_SOURCE_DIR}/src)
target_link_libraries(test_driver PRIVATE Threads::Threads)
target_link_options(test_driver PRIVATE -Wl,-z,nodelete -Wl,--exclude-libs,ALL)
set_target_properties(test_driver PROPERTIES OUTPUT_NAME cuda SOVERSION 1 CXX_VISIBILITY_PRESET hidden
  VISIBILITY_INLINES_HIDDEN ON LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/src/cuda/testing)

# kt_use_test_driver(TARGET): a test program whose sources include cuda/testing/test_cuda.h.
function(kt_use_test_driver target)
  target_compile_definitions(${target} PRIVATE KT_TEST_CUDA_LIBRARY="$<TARGET_FILE:test_driver>")
  add_dependencies(${target} test_driver)
endfunction()

# A driver of another time, which lacks most of it.
add_library(old_driver SHARED ${CMAKE_CURRENT_LIST_DIR}/old_driver.cc)
set_target_properties(old_driver PROPERTIES OUTPUT_NAME cuda SOVERSION 1
  LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/src/cuda/testing/old)

# Says what cuda_driver() finds, in a process of its own.
add_executable(cuda_probe ${CMAKE_CURRENT_LIST_DIR}/probe.cc)
target_link_libraries(cuda_probe PRIVATE kt_cuda)

kt_use_test_driver(cuda_test)
target_compile_definitions(cuda_test PRIVATE KT_CUDA_PROBE="$<TARGET_FILE:cuda_probe>"
  KT_OLD_CUDA_LIBRARY="$<TARGET_FILE:old_driver>")
add_dependencies(cuda_test cuda_probe old_driver)
