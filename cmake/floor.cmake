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

# kt_precompile(TARGET FIRST headers...): the first target that asks makes the headers, named FIRST; the others take
# them.
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
# Most files of these read JSON, whose header is as long as half of the others; to a file that does not it costs as much
# as it saves the others.
set(KT_JSON_FLOORS text hub weights models hybrid engine server)

# Most of compiling a file here is what it takes from headers: a file that sees JSON spends six seconds on that and half
# a second on itself. So the files of a room are compiled as one. A compiler cache likes small files better.
if(CMAKE_CXX_COMPILER_LAUNCHER)
  set(unity OFF)
else()
  set(unity ON)
endif()
option(KT_UNITY "compile the files of a room together" ${unity})

# kt_rooms_as_one(TARGET sources...)
function(kt_rooms_as_one target)
  if(NOT KT_UNITY)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  # g++ cannot know that a type with hidden members, defined in an included file, is included once only.
  target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  foreach(source ${ARGN})
    get_filename_component(folder ${source} DIRECTORY)
    get_filename_component(room ${folder} NAME)
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${room})
  endforeach()
endfunction()

# kt_sources(SOURCES TESTS): what stands in the current folder and in its rooms, one level down. testing/ holds programs
# and headers of tests, arch/ what only one architecture compiles, backend/ what a library has to be found for: all
# named by hand.
function(kt_sources sources tests)
  file(GLOB all CONFIGURE_DEPENDS *.cc */*.cc)
  list(FILTER all EXCLUDE REGEX "/(testing|arch|backend)/[^/]*$")
  set(of_tests ${all})
  list(FILTER of_tests INCLUDE REGEX "_test.cc$")
  list(FILTER all EXCLUDE REGEX "_test.cc$")
  set(${sources} ${all} PARENT_SCOPE)
  set(${tests} ${of_tests} PARENT_SCOPE)
endfunction()

# Floors of hot loops, few headers and many constants of one name; their tests are no such thing.
set(KT_SINGLE_FILES nn hybrid)

# kt_floor(NAME deps...): one folder of src/ becomes the static library kt_NAME; every x_test.cc beside
# the sources goes into one test program, NAME_test.
function(kt_floor name)
  kt_sources(sources tests)
  add_library(kt_${name} STATIC ${sources})
  if(NOT name IN_LIST KT_SINGLE_FILES)
    kt_rooms_as_one(kt_${name} ${sources})
  endif()
  target_include_directories(kt_${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>)
  target_link_libraries(kt_${name} PUBLIC Threads::Threads)
  target_compile_options(kt_${name} PRIVATE ${KT_WARNINGS})
  if(name IN_LIST KT_JSON_FLOORS)
    kt_precompile(kt_${name} kt_text ${KT_COMMON_HEADERS} <nlohmann/json.hpp>)
  else()
    kt_precompile(kt_${name} kt_base ${KT_COMMON_HEADERS})
  endif()
  foreach(dep ${ARGN})
    target_link_libraries(kt_${name} PUBLIC kt_${dep})
  endforeach()
  if(KT_TESTS AND tests)
    kt_test(${name}_test ${tests})
    target_link_libraries(${name}_test PRIVATE kt_${name})
  endif()
endfunction()

# Tests are compiled without optimisation, which takes little more than half the time; what they test is not. These
# compute as much themselves as they test, or run under emulation.
set(KT_OPTIMISED_TESTS formats_test kernels_test nn_test)
if(CMAKE_CROSSCOMPILING)
  list(APPEND KT_OPTIMISED_TESTS weights_test)
endif()

# kt_test(NAME sources...): a GoogleTest program, registered with CTest as one test.
function(kt_test name)
  add_executable(${name} ${ARGN})
  kt_rooms_as_one(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE GTest::gmock_main)
  target_compile_options(${name} PRIVATE ${KT_WARNINGS})
  if(name IN_LIST KT_OPTIMISED_TESTS)
    set(first formats_test)
  else()
    set(first base_test)
    target_compile_options(${name} PRIVATE -O0)
  endif()
  kt_precompile(${name} ${first} ${KT_COMMON_HEADERS} <gtest/gtest.h> <gmock/gmock.h>)
  add_test(NAME ${name} COMMAND ${name})
endfunction()
