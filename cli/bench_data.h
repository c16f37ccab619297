// violin bench data, a verb below `violin bench`.
#pragma once

#include <CLI/CLI.hpp>

namespace violin::cli {

void add_bench_data(CLI::App& bench);

}  // namespace violin::cli
