# violin_attention_cases: the table of attention calls, for the tests and for the bench. The JSON is part of the program,
# which may be installed far from here.
include_guard(GLOBAL)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/attention_cases.json")
file(READ "${CMAKE_CURRENT_LIST_DIR}/attention_cases.json" VIOLIN_ATTENTION_CASES)
configure_file("${CMAKE_CURRENT_LIST_DIR}/attention_cases_json.h.in"
               "${PROJECT_BINARY_DIR}/generated/tests/attention_cases_json.h" @ONLY)

add_library(violin_attention_cases STATIC "${CMAKE_CURRENT_LIST_DIR}/attention_cases.cpp")
target_link_libraries(violin_attention_cases PUBLIC violin_ops PRIVATE nlohmann_json::nlohmann_json)
violin_uses_torch(violin_attention_cases)
