# LibTorch out of the Python wheel, as one imported target: violin::torch.
#
# Torch's own CMake package appends CUDA flags of its own and fails on partial toolkits, so its include and library folders
# are wrapped directly. Looked for in this order: VIOLIN_TORCH_DIR, the interpreter VIOLIN_PYTHON, python3.
# Sets VIOLIN_TORCH_VERSION and VIOLIN_TORCH_CUDA.

set(ViolinTorch_FOUND TRUE)  # what is missing below ends the configuration with a message
if(TARGET violin::torch)
  return()
endif()

if(NOT VIOLIN_TORCH_DIR)
  set(_violin_python "${VIOLIN_PYTHON}")
  if(NOT _violin_python)
    set(_violin_python python3)
  endif()
  execute_process(COMMAND "${_violin_python}" -c "import importlib.util as u; print(list(u.find_spec('torch').submodule_search_locations)[0])"
                  OUTPUT_VARIABLE VIOLIN_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT EXISTS "${VIOLIN_TORCH_DIR}/include/torch/csrc/api/include/torch/torch.h")
  message(FATAL_ERROR "LibTorch was not found ('${VIOLIN_TORCH_DIR}'). Run `make build`, which sets it up, or pass "
                      "-DVIOLIN_PYTHON=<interpreter that imports torch> or -DVIOLIN_TORCH_DIR=<its torch folder>.")
endif()

file(READ "${VIOLIN_TORCH_DIR}/version.py" _violin_version_py)
string(REGEX MATCH "__version__ = '([0-9]+\\.[0-9]+\\.[0-9]+)" _ "${_violin_version_py}")
set(VIOLIN_TORCH_VERSION "${CMAKE_MATCH_1}")
if(VIOLIN_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "torch ${VIOLIN_TORCH_VERSION} in ${VIOLIN_TORCH_DIR} is too old: Violin needs 2.11 or later.")
endif()

add_library(violin::torch INTERFACE IMPORTED)
target_include_directories(violin::torch SYSTEM INTERFACE
  "${VIOLIN_TORCH_DIR}/include" "${VIOLIN_TORCH_DIR}/include/torch/csrc/api/include")
target_compile_features(violin::torch INTERFACE cxx_std_20)
# at::parallel_for is silently serial in files that are compiled without this; the runtime is the one torch ships.
target_compile_options(violin::torch INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
# torch carries fmt's headers without its library.
target_compile_definitions(violin::torch INTERFACE FMT_HEADER_ONLY)
# The CPU library must be there although nothing of ours names its symbols directly (operators register themselves).
target_link_options(violin::torch INTERFACE "LINKER:--no-as-needed" "LINKER:-rpath,${VIOLIN_TORCH_DIR}/lib")
foreach(_violin_lib c10 torch_cpu torch)
  target_link_libraries(violin::torch INTERFACE "${VIOLIN_TORCH_DIR}/lib/lib${_violin_lib}.so")
endforeach()
file(GLOB _violin_gomp "${VIOLIN_TORCH_DIR}/lib/libgomp*.so*" "${VIOLIN_TORCH_DIR}.libs/libgomp*.so*"
     "${VIOLIN_TORCH_DIR}/../torch.libs/libgomp*.so*")
if(_violin_gomp)
  list(GET _violin_gomp 0 _violin_gomp)
  target_link_libraries(violin::torch INTERFACE "${_violin_gomp}")
else()
  target_link_libraries(violin::torch INTERFACE gomp)
endif()
set(VIOLIN_TORCH_CUDA OFF)
if(EXISTS "${VIOLIN_TORCH_DIR}/lib/libtorch_cuda.so")
  set(VIOLIN_TORCH_CUDA ON)
  foreach(_violin_lib c10_cuda torch_cuda)
    target_link_libraries(violin::torch INTERFACE "${VIOLIN_TORCH_DIR}/lib/lib${_violin_lib}.so")
  endforeach()
endif()

# fmt alone, for code that does without torch: its headers come with torch (g++ 12 has no std::format).
add_library(violin_fmt INTERFACE)
target_include_directories(violin_fmt SYSTEM INTERFACE "$<BUILD_INTERFACE:${VIOLIN_TORCH_DIR}/include>")
target_compile_definitions(violin_fmt INTERFACE FMT_HEADER_ONLY)
