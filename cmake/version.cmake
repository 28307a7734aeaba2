# The version from git, at every build: cmake -DSOURCE=DIR -DBASE=0.1.0 -DOUTPUT=DIR -P version.cmake writes
# kt_version.h and kt_version.cmake into OUTPUT, and touches them only when the version changed.
#
#   at tag v0.2.0                  0.2.0
#   5 commits later                0.2.0+5.g3f2a9c1b0d
#   no tag                         0.1.0+g3f2a9c1b0d
#   changes not committed          ...dirty at the end
#   no git, or somebody else's     0.1.0
set(version ${BASE})
find_program(GIT git)
function(ask_git result)
  execute_process(COMMAND ${GIT} -C ${SOURCE} ${ARGN} OUTPUT_VARIABLE words OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET
    RESULT_VARIABLE code)
  if(NOT code EQUAL 0)
    set(words "")
  endif()
  set(${result} "${words}" PARENT_SCOPE)
endfunction()

if(GIT)
  # An unpacked release inside another repository must not take that one's version.
  ask_git(top rev-parse --show-toplevel)
  get_filename_component(source ${SOURCE} REALPATH)
  if(top AND top STREQUAL source)
    ask_git(tagged describe --tags --match v[0-9]* --abbrev=10 --dirty)
    ask_git(bare describe --always --exclude=* --abbrev=10 --dirty)
  endif()
endif()
if(tagged)
  string(REGEX REPLACE "^v" "" version ${tagged})
  string(REGEX REPLACE "-([0-9]+)-g([0-9a-f]+)" "+\\1.g\\2" version ${version})
elseif(bare)
  set(version ${BASE}+g${bare})
endif()
if(version MATCHES "[+]")
  string(REPLACE "-dirty" ".dirty" version ${version})
else()
  string(REPLACE "-dirty" "+dirty" version ${version})
endif()

file(CONFIGURE OUTPUT ${OUTPUT}/kt_version.h CONTENT "#define KT_VERSION \"${version}\"\n")
file(CONFIGURE OUTPUT ${OUTPUT}/kt_version.cmake CONTENT "set(KT_VERSION \"${version}\")\n")
