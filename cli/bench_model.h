#pragma once

#include <CLI/CLI.hpp>

namespace violin::cli {

void add_bench_model(CLI::App& bench);

}  // namespace violin::cli
