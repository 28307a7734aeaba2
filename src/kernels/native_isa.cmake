# KT_NATIVE_ISAS: what native_isa.cc prints, asked once for a build folder.
if(NOT DEFINED CACHE{KT_NATIVE_ISAS})
  if(CMAKE_CROSSCOMPILING)
    message(FATAL_ERROR "KT_ISAS=${KT_ISAS}: a cross build cannot ask the CPU that will run it")
  endif()
  set(base ${PROJECT_SOURCE_DIR}/src/base)
  try_run(status compiled
    SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/native_isa.cc ${base}/cpu.cc ${base}/file.cc ${base}/text.cc
      ${base}/error.cc ${base}/mapped_faults.cc ${base}/fork_mutex.cc
    CMAKE_FLAGS -DINCLUDE_DIRECTORIES=${PROJECT_SOURCE_DIR}/src -DCMAKE_BUILD_TYPE=Debug
    CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON
    COMPILE_OUTPUT_VARIABLE log RUN_OUTPUT_VARIABLE names)
  if(NOT compiled OR NOT status EQUAL 0)
    message(FATAL_ERROR "KT_ISAS=${KT_ISAS}: this CPU could not be asked; -DKT_ISAS=all goes without\n${log}")
  endif()
  set(KT_NATIVE_ISAS ${names} CACHE INTERNAL "the instruction sets that this CPU runs, worst first")
endif()
