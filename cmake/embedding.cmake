# What another program needs to have the engine inside: headers, static libraries and a CMake package, so that
# find_package(kt) gives kt::engine. A component of its own (devel): packages of the program go without it.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
# The floors below the engine, and the engine.
set(KT_EMBEDDED base formats text terminal hub kernels cuda weights nn models engine)
# What people include; what these include is found when they are installed.
set(KT_PUBLIC_HEADERS engine/generate.h engine/scheduler.h text/chat_template.h)

set(package ${CMAKE_INSTALL_LIBDIR}/cmake/kt)
foreach(name ${KT_EMBEDDED})
  set_target_properties(kt_${name} PROPERTIES EXPORT_NAME ${name})
  install(TARGETS kt_${name} EXPORT kt ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT devel
    INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} ${CMAKE_INSTALL_INCLUDEDIR}/kt)
endforeach()
target_compile_features(kt_engine INTERFACE cxx_std_20)
install(EXPORT kt NAMESPACE kt:: FILE kt-targets.cmake DESTINATION ${package} COMPONENT devel)

install(CODE "set(SOURCE ${PROJECT_SOURCE_DIR}/src)\nset(HEADERS ${KT_PUBLIC_HEADERS})\n\
set(FOLDER \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_INCLUDEDIR}/kt\")" COMPONENT devel)
install(SCRIPT cmake/install_headers.cmake COMPONENT devel)

get_property(KT_DOWNLOADS GLOBAL PROPERTY KT_DOWNLOADS)
configure_package_config_file(cmake/kt-config.cmake.in ${PROJECT_BINARY_DIR}/package/kt-config.cmake
  INSTALL_DESTINATION ${package})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/kt-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/package/kt-config.cmake ${PROJECT_BINARY_DIR}/package/kt-config-version.cmake
  DESTINATION ${package} COMPONENT devel)
