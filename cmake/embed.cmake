# Files inside the program, with nothing but CMake. Two uses of one file:
#
#   kt_embed(TARGET HEADER NAME FOLDER files...)   adds to TARGET a source that defines the function
#                                                  std::span<const EmbeddedFile> kt::NAME() of HEADER, in the
#                                                  namespace of HEADER's folder; it is made again when a file changes
#   cmake -DHEADER= -DNAME= -DFOLDER= -DFILES=a,b -DOUT= -P embed.cmake   writes that source
if(NOT CMAKE_SCRIPT_MODE_FILE)
  set(KT_EMBED_SCRIPT ${CMAKE_CURRENT_LIST_FILE})

  function(kt_embed target header name folder)
    set(out ${CMAKE_CURRENT_BINARY_DIR}/${name}.cc)
    list(JOIN ARGN "," files)
    list(TRANSFORM ARGN PREPEND ${folder}/ OUTPUT_VARIABLE paths)
    add_custom_command(
      OUTPUT ${out}
      COMMAND ${CMAKE_COMMAND} -DHEADER=${header} -DNAME=${name} -DFOLDER=${folder} -DFILES=${files} -DOUT=${out}
              -P ${KT_EMBED_SCRIPT}
      DEPENDS ${paths} ${KT_EMBED_SCRIPT}
      COMMENT "Embedding ${name}"
      VERBATIM)
    # Not a source of TARGET itself: its command would wait for all that TARGET links, and TARGET's files for the
    # command.
    add_library(${name} OBJECT ${out})
    target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${name}>)
  endfunction()
  return()
endif()

string(REPLACE "," ";" FILES "${FILES}")
set(arrays "")
set(rows "")
set(number 0)
foreach(file ${FILES})
  file(READ ${FOLDER}/${file} bytes HEX)
  string(LENGTH "${bytes}" digits)
  math(EXPR size "${digits} / 2")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
  set(four "0x..,0x..,0x..,0x..,")
  string(REGEX REPLACE "(${four}${four}${four}${four})" "\\1\n" bytes "${bytes}")
  # The zero at the end stands for an empty file, which C++ has no array for.
  string(APPEND arrays "const unsigned char bytes_${number}[] = {\n${bytes}0};\n")
  string(APPEND rows "    {\"${file}\", {reinterpret_cast<const char*>(bytes_${number}), ${size}}},\n")
  math(EXPR number "${number} + 1")
endforeach()
list(JOIN FILES " " names)
get_filename_component(floor ${HEADER} DIRECTORY)
file(WRITE ${OUT} "// Made by cmake/embed.cmake of ${names}.
#include \"${HEADER}\"

namespace kt::inline ${floor} {
namespace {
${arrays}
const EmbeddedFile kFiles[] = {
${rows}};
}  // namespace

std::span<const EmbeddedFile> ${NAME}() { return kFiles; }
}  // namespace kt::inline ${floor}
")
