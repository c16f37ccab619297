# libwebp is optional: without it, WebP files are refused with a message that says so.
find_path(VIOLIN_WEBP_INCLUDE webp/decode.h)
find_library(VIOLIN_WEBP_LIBRARY webp)
if(VIOLIN_WEBP_INCLUDE AND VIOLIN_WEBP_LIBRARY)
  add_library(violin_webp INTERFACE)
  target_include_directories(violin_webp SYSTEM INTERFACE "$<BUILD_INTERFACE:${VIOLIN_WEBP_INCLUDE}>")
  target_link_libraries(violin_webp INTERFACE "${VIOLIN_WEBP_LIBRARY}")
  target_compile_definitions(violin_webp INTERFACE VIOLIN_HAVE_WEBP=1)
endif()
