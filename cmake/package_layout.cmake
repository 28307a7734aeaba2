# Run by cpack over the files of a package: Debian's zsh looks for completions of packages in a folder of its own.
set(share ${CPACK_TEMPORARY_INSTALL_DIRECTORY}/usr/share)
if(CPACK_GENERATOR STREQUAL "DEB" AND EXISTS ${share}/zsh/site-functions)
  file(RENAME ${share}/zsh/site-functions ${share}/zsh/vendor-completions)
endif()
