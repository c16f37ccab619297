# ccache when present. Precompiled headers need -fpch-preprocess and some sloppiness; the rest of ccache's defaults stay.
find_program(VIOLIN_CCACHE ccache)
if(VIOLIN_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(_launcher "${CMAKE_COMMAND}" -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime "${VIOLIN_CCACHE}")
  set(CMAKE_CXX_COMPILER_LAUNCHER ${_launcher})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${_launcher})
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
  endif()
endif()
