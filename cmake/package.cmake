# What `cmake --install` puts where, and the .deb and .tar.gz of CPack. The man page and the completions come from the
# program that was just built, so a cross build goes without them.
include(GNUInstallDirs)
set(documents ${PROJECT_BINARY_DIR}/documents)
install(TARGETS kt RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
kt_install_demo(${CMAKE_INSTALL_DATADIR}/kt/demo)
install(FILES README.md LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/kt)
# Where systemd looks, also below /usr/local. Nothing enables it.
install(FILES cmake/systemd/kt.service DESTINATION lib/systemd/system)
install(FILES cmake/systemd/kt.conf DESTINATION lib/sysusers.d)

# kt_document(FILE FOLDER words...): what `kt words...` prints, installed as FOLDER/FILE.
function(kt_document file folder)
  add_custom_command(OUTPUT ${documents}/${file}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${documents}
    COMMAND kt ${ARGN} > ${documents}/${file}
    DEPENDS kt COMMENT "Writing ${file}" VERBATIM)
  set_property(GLOBAL APPEND PROPERTY KT_DOCUMENTS ${documents}/${file})
  install(FILES ${documents}/${file} DESTINATION ${folder})
endfunction()
if(NOT CMAKE_CROSSCOMPILING)
  kt_document(kt.1 ${CMAKE_INSTALL_MANDIR}/man1 help --man)
  kt_document(kt ${CMAKE_INSTALL_DATADIR}/bash-completion/completions completion bash)
  kt_document(_kt ${CMAKE_INSTALL_DATADIR}/zsh/site-functions completion zsh)
  kt_document(kt.fish ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d completion fish)
  get_property(files GLOBAL PROPERTY KT_DOCUMENTS)
  add_custom_target(kt_documents ALL DEPENDS ${files})
else()
  add_custom_target(kt_documents DEPENDS kt)
endif()

set(architecture_x86_64 amd64)
set(architecture_aarch64 arm64)
set(CPACK_PACKAGE_NAME kt)
set(CPACK_PACKAGE_VENDOR "KT developers")
set(CPACK_PACKAGE_CONTACT "KT developers <kt@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "runs Mixture-of-Experts language models on CPUs")
set(CPACK_PACKAGE_DESCRIPTION "One program with a server, a chat, converters and benchmarks. The experts of a model
live in CPU memory and run on kernels for x86 from AVX2 to AMX and for ARM from NEON to i8mm.")
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_SYSTEM_NAME linux-${CMAKE_SYSTEM_PROCESSOR})
set(CPACK_GENERATOR DEB TGZ)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_ARCHITECTURE ${architecture_${CMAKE_SYSTEM_PROCESSOR}})
set(CPACK_DEBIAN_PACKAGE_SECTION science)
find_program(KT_SHLIBDEPS dpkg-shlibdeps)  # of the package dpkg-dev: the versions that are really needed
if(KT_SHLIBDEPS)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
else()
  set(CPACK_DEBIAN_PACKAGE_DEPENDS "libc6, libgcc-s1, libstdc++6")
  get_property(downloads GLOBAL PROPERTY KT_DOWNLOADS)
  if(downloads)
    string(APPEND CPACK_DEBIAN_PACKAGE_DEPENDS ", libcurl4 | libcurl4t64")
  endif()
  get_property(tls GLOBAL PROPERTY KT_HAS_TLS)
  if(tls)
    string(APPEND CPACK_DEBIAN_PACKAGE_DEPENDS ", libssl3 | libssl3t64")
  endif()
endif()
# The program's files; those of cmake/embedding.cmake are for who builds with it, and many times as large.
set(CPACK_INSTALL_CMAKE_PROJECTS "${PROJECT_BINARY_DIR};kt;Unspecified;/")
# Read when cpack runs: the version of what was built last, and where Debian keeps things.
set(CPACK_PROJECT_CONFIG_FILE ${PROJECT_SOURCE_DIR}/cmake/package_config.cmake)
set(CPACK_PRE_BUILD_SCRIPTS ${PROJECT_SOURCE_DIR}/cmake/package_layout.cmake)
set(CPACK_KT_VERSION_FILE ${PROJECT_BINARY_DIR}/generated/kt_version.cmake)
include(CPack)
