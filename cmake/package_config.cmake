# Read by cpack for each kind of package, before it looks at anything else.
include(${CPACK_KT_VERSION_FILE})
set(CPACK_PACKAGE_VERSION ${KT_VERSION})
set(CPACK_PACKAGE_FILE_NAME kt-${KT_VERSION}-${CPACK_SYSTEM_NAME})
if(CPACK_GENERATOR STREQUAL "DEB")
  set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
endif()
