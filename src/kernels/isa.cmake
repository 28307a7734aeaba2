# The kernels are one huge function for each layout, all inlined. -O3: g++ keeps the accumulators of a register tile in
# memory unless loops of constant length are unrolled before its scalar replacement, which -O2 does not do.
# Instrumented a row compiles for over nine minutes; with every check a call and locals poisoned once a
# function, for a minute and a half (Neoverse N1). UBSan stays on the rest of the sources.
set(kt_row_options -O3)
if(KT_SANITIZE)
  set(kt_row_options -O1 -g1 -fno-sanitize=undefined -fno-sanitize-address-use-after-scope
    --param=asan-instrumentation-with-call-threshold=0)
endif()

set(kt_row_sources instantiate.cc instantiate_few_short.cc instantiate_few_long.cc instantiate_many_spans.cc
    instantiate_many_s8.cc instantiate_many_bf16.cc instantiate_many_f32.cc instantiate_attention.cc
    instantiate_row_ops.cc instantiate_gram.cc instantiate_back.cc)

# all; native: the best that this CPU runs; runnable: all that it runs, and of the others no more than what a parser
# finds, for tests that could not run them; or names, as "avx2;amx". portable is always there: it is what the others
# are held against.
set(KT_ISAS all CACHE STRING "instruction sets to compile: all, native, runnable or a list of names")
set(isas ${KT_ISAS})
if("native" IN_LIST isas OR "runnable" IN_LIST isas)
  include(native_isa.cmake)
  list(GET KT_NATIVE_ISAS -1 best)
  list(TRANSFORM isas REPLACE "^native$" ${best})
  list(TRANSFORM isas REPLACE "^runnable$" "${KT_NATIVE_ISAS}")
  message(STATUS "instruction sets: ${isas}")
endif()

# A row that is left out, its files as one, checked as far as a compiler does before it makes code: a tenth of the time.
set(parsed_row ${CMAKE_CURRENT_BINARY_DIR}/parsed/row.cc)
list(TRANSFORM kt_row_sources REPLACE "(.+)" "#include \"kernels/\\1\"\n" OUTPUT_VARIABLE includes)
string(JOIN "" includes ${includes})
file(CONFIGURE OUTPUT ${parsed_row} CONTENT "${includes}" @ONLY)
function(kt_parse_row name definitions options)
  get_directory_property(all COMPILE_OPTIONS)
  if(KT_WERROR)
    list(APPEND all -Werror)
  endif()
  list(TRANSFORM definitions PREPEND -D)
  set(stamp ${CMAKE_CURRENT_BINARY_DIR}/parsed/${name})
  add_custom_command(OUTPUT ${stamp}
    COMMAND ${CMAKE_CXX_COMPILER} -std=c++20 ${all} ${options} ${definitions} -I${PROJECT_SOURCE_DIR}/src -fsyntax-only
      -MD -MF ${stamp}.d -MT ${stamp} ${parsed_row}
    COMMAND ${CMAKE_COMMAND} -E touch ${stamp}
    DEPENDS ${parsed_row} ${kt_row_sources} DEPFILE ${stamp}.d COMMENT "Parsing the row of ${name}" VERBATIM)
  add_custom_target(kt_isa_${name}_parsed ALL DEPENDS ${stamp})
  add_dependencies(kt_kernels kt_isa_${name}_parsed)
endfunction()

# One row per ISA: kt_isa(NAME HEADER CLASS flags...), worst first.
set(isa_rows "")
set(known_isas all)
function(kt_isa name header class)
  list(APPEND known_isas ${name})
  set(known_isas ${known_isas} PARENT_SCOPE)
  set(definitions KT_ISA_NAME="${name}" KT_ISA_NAMESPACE=kt_isa_${name} KT_ISA_HEADER="kernels/isa/${header}"
    KT_ISA_CLASS=${class} ${KT_FRAGMENT})
  # -fno-exceptions: no weak reference to a personality routine.
  set(options ${kt_row_options} -fno-exceptions ${ARGN})
  if(NOT name STREQUAL "portable" AND NOT "all" IN_LIST isas AND NOT name IN_LIST isas)
    set(isa_rows "${isa_rows}KT_LEFT_OUT(${name})\n" PARENT_SCOPE)
    if("runnable" IN_LIST KT_ISAS)
      kt_parse_row(${name} "${definitions}" "${options}")
    endif()
    return()
  endif()
  set(isa_rows "${isa_rows}KT_COMPILED(${name})\n" PARENT_SCOPE)
  set(object kt_isa_${name})
  add_library(${object} OBJECT ${kt_row_sources})
  target_include_directories(${object} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_compile_definitions(${object} PRIVATE ${definitions})
  target_compile_options(${object} PRIVATE ${options})
  target_sources(kt_kernels PRIVATE $<TARGET_OBJECTS:${object}>)
endfunction()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(KT_FRAGMENT KT_STEP_BYTES=4 KT_UNSIGNED_BYTES=true)
  kt_isa(portable portable.h Portable)
  set(avx2 -mavx2 -mfma -mf16c)
  # g++ 12's own header initialises `__m512i __Y = __Y` and warns of it
  set(avx512 -Wno-uninitialized -Wno-maybe-uninitialized ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl
      -mprefer-vector-width=512)
  kt_isa(avx2 avx2.h Avx2 ${avx2})
  kt_isa(avx_vnni avx2.h AvxVnni ${avx2} -mavxvnni)
  kt_isa(avx512 avx512.h Avx512 ${avx512})
  kt_isa(avx512_vnni avx512.h Avx512Vnni ${avx512} -mavx512vnni)
  kt_isa(avx512_bf16 avx512.h Avx512Bf16 ${avx512} -mavx512vnni -mavx512vbmi -mavx512bf16)
  kt_isa(amx amx.h Amx ${avx512} -mavx512vnni -mavx512vbmi -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16)
else()
  set(KT_FRAGMENT KT_STEP_BYTES=8 KT_UNSIGNED_BYTES=false)
  # g++ schedules before it allocates registers here, and spills what it moved up; without, most of `few` is faster.
  set(neon -fno-schedule-insns)
  kt_isa(portable portable.h Portable)
  kt_isa(neon neon.h Neon ${neon} -march=armv8-a)
  kt_isa(neon_dotprod neon.h NeonDotprod ${neon} -march=armv8.2-a+dotprod)
  kt_isa(neon_i8mm neon.h NeonI8mm ${neon} -march=armv8.2-a+dotprod+fp16+fp16fml+i8mm+bf16)
endif()

foreach(isa ${isas})
  if(NOT isa IN_LIST known_isas)
    message(FATAL_ERROR "KT_ISAS: expected native, runnable or some of ${known_isas}, '${isa}' came")
  endif()
endforeach()
file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/isa/isa_rows.inc CONTENT "${isa_rows}")
target_include_directories(kt_kernels PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/isa)

# The tile loops over an emulated unit, for kernels_test on any CPU; no part of kt_kernels. Plain C++, so one
# architecture is enough: a cross build has it compiled and run by the build for the host.
if(KT_TESTS AND NOT CMAKE_CROSSCOMPILING)
  add_library(kt_isa_amx_emulated OBJECT ${kt_row_sources})
  target_include_directories(kt_isa_amx_emulated PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_compile_definitions(kt_isa_amx_emulated PRIVATE KT_ISA_NAME="amx_emulated" KT_ISA_NAMESPACE=kt_isa_amx_emulated
    KT_ISA_HEADER="kernels/isa/amx_emulated.h" KT_ISA_CLASS=AmxEmulated KT_STEP_BYTES=4 KT_UNSIGNED_BYTES=true)
  target_compile_options(kt_isa_amx_emulated PRIVATE -fno-exceptions)
  if(KT_SANITIZE)
    target_compile_options(kt_isa_amx_emulated PRIVATE ${kt_row_options})
  endif()
endif()
