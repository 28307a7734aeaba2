# KT_JSON_INCLUDE: a folder that holds nlohmann/ and nothing else, so that a cross build can use the host's copy
# (headers only) without seeing the host's other headers.
find_path(KT_JSON_FOUND nlohmann/json.hpp PATHS /usr/include NO_CMAKE_FIND_ROOT_PATH)
if(NOT KT_JSON_FOUND)
  message(FATAL_ERROR "nlohmann-json (nlohmann/json.hpp) not found: apt-get install nlohmann-json3-dev, or "
    "-DKT_JSON_FOUND=DIR")
endif()
set(KT_JSON_INCLUDE ${PROJECT_BINARY_DIR}/include)
file(MAKE_DIRECTORY ${KT_JSON_INCLUDE})
file(CREATE_LINK ${KT_JSON_FOUND}/nlohmann ${KT_JSON_INCLUDE}/nlohmann SYMBOLIC)
