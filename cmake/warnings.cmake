# Off for people who build with a compiler newer than ours; scripts/test.sh sets it.
option(KT_WERROR "warnings are errors" OFF)
set(CMAKE_COMPILE_WARNING_AS_ERROR ${KT_WERROR})

# These follow values through inlined code and guess: which lines they dislike changes with each version of g++ and with
# what the optimiser inlined. 12 warns of uninitialised vectors in its own AVX-512 header, 13 of references that nobody
# keeps and of strings that are never that long. They stay warnings.
if(KT_WERROR)
  include(CheckCXXCompilerFlag)
  foreach(guess uninitialized maybe-uninitialized dangling-reference dangling-pointer stringop-overflow
          stringop-overread array-bounds restrict nonnull null-dereference free-nonheap-object mismatched-new-delete
          use-after-free)
    check_cxx_compiler_flag(-W${guess} KT_WARNS_${guess})
    if(KT_WARNS_${guess})
      add_compile_options(-Wno-error=${guess})
    endif()
  endforeach()
endif()
