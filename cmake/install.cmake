# cmake --install: headers, libraries, the binary and a package for find_package(violin).
include(CMakePackageConfigHelpers)

set(violin_installed
    violin_base violin_text violin_curves violin_kernels violin_ops violin_data violin_data_torch violin_viz violin_nn)
if(TARGET violin_kernels_cuda)
  list(APPEND violin_installed violin_kernels_cuda)
endif()
list(APPEND violin_installed violin_checkpoint violin_predict)
if(TARGET violin_webp)
  list(APPEND violin_installed violin_webp)
endif()
# Consumers write violin::curves (torch-free) or violin::violin (everything).
foreach(target ${violin_installed})
  string(REPLACE "violin_" "" short ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${short})
  add_library(violin::${short} ALIAS ${target})
endforeach()
# Our headers are C++20. Not said of violin_base, which CUDA targets use too: CMake 3.25 knows no CUDA 20.
foreach(target violin_text violin_curves violin_ops violin_data violin_data_torch violin_viz violin_nn violin_checkpoint violin_predict)
  target_compile_features(${target} INTERFACE cxx_std_20)
endforeach()
add_library(violin_all INTERFACE)
target_link_libraries(violin_all INTERFACE
  violin_predict violin_checkpoint violin_nn violin_viz violin_data_torch violin_data violin_ops)
set_target_properties(violin_all PROPERTIES EXPORT_NAME violin)
add_library(violin::violin ALIAS violin_all)

set_target_properties(violin_ops PROPERTIES INSTALL_RPATH "$ORIGIN;${VIOLIN_TORCH_DIR}/lib")
install(TARGETS ${violin_installed} violin_all EXPORT violin_targets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(VIOLIN_CLI)
  set_target_properties(violin PROPERTIES
    INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${VIOLIN_TORCH_DIR}/lib")
  install(TARGETS violin RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(DIRECTORY examples/cifar100-sample DESTINATION share/violin)  # where violin demo looks for them
endif()
install(DIRECTORY violin DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h" PATTERN "*_impl.h" EXCLUDE)
install(FILES "${PROJECT_BINARY_DIR}/generated/violin/version_number.h" DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/violin)

set(violin_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/violin)
install(EXPORT violin_targets NAMESPACE violin:: FILE violin_targets.cmake DESTINATION ${violin_package_dir})
configure_package_config_file(cmake/violinConfig.cmake.in "${PROJECT_BINARY_DIR}/violinConfig.cmake"
                              INSTALL_DESTINATION ${violin_package_dir})
write_basic_package_version_file("${PROJECT_BINARY_DIR}/violinConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/violinConfig.cmake" "${PROJECT_BINARY_DIR}/violinConfigVersion.cmake"
              cmake/FindViolinTorch.cmake DESTINATION ${violin_package_dir})
