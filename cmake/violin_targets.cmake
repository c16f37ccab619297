# Helpers that every folder's CMakeLists.txt uses.

# violin_base: include path, warnings, language. Links nothing.
add_library(violin_base INTERFACE)
target_include_directories(violin_base INTERFACE
  "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>" "$<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/generated>"
  "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")

# Not CMAKE_POSITION_INDEPENDENT_CODE: executables would get -fPIE and could not share the precompiled header.
add_compile_options(-fPIC)
set(warnings -Wall -Wextra -Wno-missing-field-initializers)  # members have defaults
if(VIOLIN_WERROR)
  list(APPEND warnings -Werror)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  # What g++ finds after inlining: false alarms inside torch's and the standard library's code, others with every change of code or flags.
  list(APPEND warnings -Wno-maybe-uninitialized -Wno-stringop-overflow -Wno-stringop-overread -Wno-array-bounds -Wno-restrict
       -Wno-use-after-free -Wno-free-nonheap-object -Wno-dangling-reference)
endif()
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${warnings}>")
if(VIOLIN_SANITIZE)
  add_compile_options(-fsanitize=${VIOLIN_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${VIOLIN_SANITIZE})
endif()

# The precompiled header, built once and shared by every target that includes torch.
function(violin_torch_pch)
  file(WRITE "${PROJECT_BINARY_DIR}/generated/violin_pch.cpp" "")
  add_library(violin_pch STATIC "${PROJECT_BINARY_DIR}/generated/violin_pch.cpp")
  target_link_libraries(violin_pch PRIVATE violin_base violin::torch)
  target_precompile_headers(violin_pch PRIVATE <torch/torch.h> <torch/library.h> <vector> <string>)
endfunction()

# Marks a target as one that includes torch.
function(violin_uses_torch target)
  target_link_libraries(${target} PUBLIC violin::torch)
  target_precompile_headers(${target} REUSE_FROM violin_pch)
endfunction()

# violin_test(NAME SOURCES ... LIBS ... [TORCH] [LABELS ...]): one executable, one ctest entry.
function(violin_test name)
  cmake_parse_arguments(arg "TORCH" "" "SOURCES;LIBS;LABELS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE violin_base ${arg_LIBS} GTest::gtest GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE VIOLIN_GOLDEN_DIR="${PROJECT_SOURCE_DIR}/tests/golden")
  if(arg_TORCH)
    violin_uses_torch(${name})
  endif()
  add_test(NAME ${name} COMMAND ${name})
  # Tests run side by side: threads that spin while they wait would take each other's cores.
  set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT 900 ENVIRONMENT "OMP_WAIT_POLICY=PASSIVE")
endfunction()
