# Designated initialisers leave out what has a default; g++ 12 warns of that in C++ too.
set(KT_WARNINGS -Wno-missing-field-initializers)

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
  add_test(NAME ${name} COMMAND ${name})
endfunction()
