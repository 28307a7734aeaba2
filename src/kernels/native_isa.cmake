# KT_NATIVE_ISA: what native_isa.cc prints, asked once for a build folder.
if(NOT DEFINED CACHE{KT_NATIVE_ISA})
  if(CMAKE_CROSSCOMPILING)
    message(FATAL_ERROR "KT_ISAS=native: a cross build cannot ask the CPU that will run it")
  endif()
  set(base ${PROJECT_SOURCE_DIR}/src/base)
  try_run(status compiled SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/native_isa.cc ${base}/cpu.cc ${base}/file.cc ${base}/text.cc
      ${base}/error.cc ${base}/mapped_faults.cc ${base}/fork_mutex.cc
    CMAKE_FLAGS -DINCLUDE_DIRECTORIES=${PROJECT_SOURCE_DIR}/src -DCMAKE_BUILD_TYPE=Debug
    CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON
    COMPILE_OUTPUT_VARIABLE log RUN_OUTPUT_VARIABLE name)
  if(NOT compiled OR NOT status EQUAL 0)
    message(FATAL_ERROR "KT_ISAS=native: this CPU could not be asked; -DKT_ISAS=all goes without\n${log}")
  endif()
  set(KT_NATIVE_ISA ${name} CACHE INTERNAL "the best instruction set that this CPU runs")
endif()
