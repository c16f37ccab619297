# Engines for several processes, each optional. VIOLIN_HAVE_MPI: processes on CPUs, with target violin_mpi.
# VIOLIN_HAVE_NCCL: processes on GPUs, where torch is a CUDA build and its process group compiles here, which needs the
# headers of CUDA and NCCL; target violin_nccl.
set(VIOLIN_HAVE_MPI OFF)
set(MPI_CXX_SKIP_MPICXX ON)
find_package(MPI QUIET COMPONENTS CXX)
if(MPI_CXX_FOUND)
  set(VIOLIN_HAVE_MPI ON)
  add_library(violin_mpi INTERFACE)
  target_link_libraries(violin_mpi INTERFACE MPI::MPI_CXX)
endif()

set(VIOLIN_HAVE_NCCL OFF)
if(VIOLIN_TORCH_CUDA)
  find_path(VIOLIN_NCCL_INCLUDE nccl.h HINTS "${VIOLIN_TORCH_DIR}/../nvidia/nccl/include" PATHS /usr/local/cuda/include)
  file(GLOB violin_cuda_wheels "${VIOLIN_TORCH_DIR}/../nvidia/cu[0-9]*/include")
  # A toolkit may lack the libraries' headers and the wheels the compiler's: both, the toolkit first.
  find_path(VIOLIN_CUDA_INCLUDE crt/host_config.h PATHS /usr/local/cuda/include)
  set(violin_cuda_includes ${VIOLIN_CUDA_INCLUDE} ${violin_cuda_wheels})
  if(VIOLIN_NCCL_INCLUDE AND VIOLIN_CUDA_INCLUDE)
    set(CMAKE_REQUIRED_FLAGS "-std=c++20")
    set(CMAKE_REQUIRED_INCLUDES "${VIOLIN_TORCH_DIR}/include" "${VIOLIN_TORCH_DIR}/include/torch/csrc/api/include"
                                "${VIOLIN_NCCL_INCLUDE}" ${violin_cuda_includes})
    set(CMAKE_REQUIRED_DEFINITIONS -DUSE_C10D_NCCL -DUSE_DISTRIBUTED)
    set(violin_target_type ${CMAKE_TRY_COMPILE_TARGET_TYPE})
    set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)  # compile, not link
    include(CheckCXXSourceCompiles)
    check_cxx_source_compiles("#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>\nint main() {}"
                              VIOLIN_NCCL_COMPILES)
    set(CMAKE_TRY_COMPILE_TARGET_TYPE ${violin_target_type})
    unset(CMAKE_REQUIRED_FLAGS)
    unset(CMAKE_REQUIRED_INCLUDES)
    unset(CMAKE_REQUIRED_DEFINITIONS)
  endif()
  if(VIOLIN_NCCL_COMPILES)
    set(VIOLIN_HAVE_NCCL ON)
    add_library(violin_nccl INTERFACE)
    target_include_directories(violin_nccl SYSTEM INTERFACE "${VIOLIN_NCCL_INCLUDE}" ${violin_cuda_includes})
    target_compile_definitions(violin_nccl INTERFACE USE_C10D_NCCL USE_DISTRIBUTED)
    # Torch's headers call the CUDA runtime, and there must be one in the process: torch's.
    file(GLOB violin_cudart "${VIOLIN_TORCH_DIR}/../nvidia/cu[0-9]*/lib/libcudart.so.*"
         "${VIOLIN_TORCH_DIR}/../nvidia/cuda_runtime/lib/libcudart.so.*")
    if(NOT violin_cudart)
      find_library(VIOLIN_CUDART cudart PATHS /usr/local/cuda/lib64 REQUIRED)
      set(violin_cudart "${VIOLIN_CUDART}")
    endif()
    list(GET violin_cudart 0 violin_cudart)
  endif()
endif()
