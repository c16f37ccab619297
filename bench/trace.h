// What one piece of work did on the host and on the device, as a file that chrome://tracing, Perfetto and
// tools/trace_summary.py read.
#pragma once

#include <functional>
#include <string>

namespace violin::bench {

void trace(const std::string& file, const std::function<void()>& work);

}  // namespace violin::bench
