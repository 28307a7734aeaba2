# The demo model. Its weights are an archive in git, a third smaller; every build unpacks them before anything opens
# them.
include(cmake/unpack.cmake)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
  ${PROJECT_SOURCE_DIR}/demo/tiny-deepseekv3/weights.tar.xz)
kt_unpack(${PROJECT_SOURCE_DIR}/demo/tiny-deepseekv3/weights.tar.xz)

# kt_install_demo(FOLDER words...): the model and its stories there; the words are those of install().
function(kt_install_demo folder)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/demo/tiny-deepseekv3 DESTINATION ${folder} ${ARGN}
    PATTERN weights.tar.xz EXCLUDE)
  install(FILES ${PROJECT_SOURCE_DIR}/demo/stories.txt DESTINATION ${folder} ${ARGN})
endfunction()
