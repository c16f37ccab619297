# A wheel: the operator library alone, beside the Python files. Nothing of images, the command or the tests is needed.
configure_file(violin/version.h.in "${PROJECT_BINARY_DIR}/generated/violin/version_number.h" @ONLY)
violin_torch_pch()
foreach(folder curves kernels ops)
  add_subdirectory(violin/${folder} "${PROJECT_BINARY_DIR}/lib/${folder}")
endforeach()

# Torch's libraries are looked for beside the package, wherever that is installed, and at no path of this machine.
get_target_property(violin_torch_options violin::torch INTERFACE_LINK_OPTIONS)
list(FILTER violin_torch_options EXCLUDE REGEX "rpath")
set_target_properties(violin::torch PROPERTIES INTERFACE_LINK_OPTIONS "${violin_torch_options}")
set_target_properties(violin_ops PROPERTIES INSTALL_RPATH "$ORIGIN/../torch/lib" BUILD_WITH_INSTALL_RPATH ON)
file(WRITE "${PROJECT_BINARY_DIR}/generated/_built_with.py" "TORCH_VERSION = \"${VIOLIN_TORCH_VERSION}\"\n")
install(TARGETS violin_ops LIBRARY DESTINATION violin)
install(FILES "${PROJECT_BINARY_DIR}/generated/_built_with.py" DESTINATION violin)
