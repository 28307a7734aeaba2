# A wheel whose tag says abi3 must hold an extension for the stable ABI: for that CMake has to find
# Python::SABIModule, which it can from 3.26 on. pyproject.toml asks for no such tag where CMake is older.
if(SKBUILD_SABI_VERSION AND NOT TARGET Python::SABIModule)
  message(FATAL_ERROR "the wheel is to be tagged abi3 (Python ${SKBUILD_SABI_VERSION} and newer), but "
    "CMake ${CMAKE_VERSION} "
    "found no Python::SABIModule: use CMake 3.26 or newer, or build with -Cwheel.py-api=")
endif()
