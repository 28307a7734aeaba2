# Designated initialisers leave out what has a default; g++ 12 warns of that in C++ too.
set(KT_WARNINGS -Wno-missing-field-initializers)

# Half of compiling a file here is reading the standard library. A compiler cache knows better (it does not see through
# precompiled headers), and then every file is compiled with its own includes alone, so a missing one is found.
if(CMAKE_CXX_COMPILER_LAUNCHER)
  set(precompile OFF)
else()
  set(precompile ON)
endif()
option(KT_PRECOMPILE "precompile the standard headers once" ${precompile})

# kt_precompile(TARGET FIRST headers...): the first target that asks makes the headers, named FIRST; the others take them.
function(kt_precompile target first)
  if(NOT KT_PRECOMPILE)
    return()
  endif()
  if(target STREQUAL first)
    target_precompile_headers(${target} PRIVATE ${ARGN})
  else()
    target_precompile_headers(${target} REUSE_FROM ${first})
  endif()
endfunction()
set(KT_COMMON_HEADERS <algorithm> <array> <atomic> <chrono> <cmath> <cstdint> <cstring> <filesystem> <functional> <map>
    <memory> <mutex> <optional> <random> <span> <string> <string_view> <thread> <unordered_map> <vector>)

# kt_floor(NAME deps...): one folder of src/ becomes the static library kt_NAME; every x_test.cc beside
# the sources goes into one test program, NAME_test.
function(kt_floor name)
  file(GLOB sources CONFIGURE_DEPENDS *.cc)
  file(GLOB tests CONFIGURE_DEPENDS *_test.cc)
  if(tests)
    list(REMOVE_ITEM sources ${tests})
  endif()
  add_library(kt_${name} STATIC ${sources})
  target_include_directories(kt_${name} PUBLIC ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(kt_${name} PUBLIC Threads::Threads)
  target_compile_options(kt_${name} PRIVATE ${KT_WARNINGS})
  kt_precompile(kt_${name} kt_base ${KT_COMMON_HEADERS})
  foreach(dep ${ARGN})
    target_link_libraries(kt_${name} PUBLIC kt_${dep})
  endforeach()
  if(KT_TESTS AND tests)
    kt_test(${name}_test ${tests})
    target_link_libraries(${name}_test PRIVATE kt_${name})
  endif()
endfunction()

# kt_test(NAME sources...): a GoogleTest program, registered with CTest as one test.
function(kt_test name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE GTest::gmock_main)
  target_compile_options(${name} PRIVATE ${KT_WARNINGS})
  kt_precompile(${name} base_test ${KT_COMMON_HEADERS} <gtest/gtest.h> <gmock/gmock.h>)
  add_test(NAME ${name} COMMAND ${name})
endfunction()
