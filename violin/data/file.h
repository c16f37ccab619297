// Whole files in and out.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

namespace violin {

using Bytes = std::vector<std::uint8_t>;

// Everything in the file; throws violin::Error when it cannot be read or holds more than `max_bytes`.
Bytes read_file(const std::filesystem::path& path, std::int64_t max_bytes);

// Writes beside the target and renames, so that a reader, a kill or a full disk never sees half of a file: the previous
// content stays whole until the new one is complete. Links are followed; devices and pipes are written directly.
// Throws violin::Error and leaves nothing behind when the target cannot be written.
void write_file_atomically(const std::filesystem::path& path, std::span<const std::uint8_t> bytes);
void write_file_atomically(const std::filesystem::path& path, std::string_view text);

// The same for content that is made piece by piece: `produce` hands each piece to the sink it is given. When it throws,
// the previous content stays.
using ByteSink = std::function<void(std::span<const std::uint8_t>)>;
void write_file_atomically(const std::filesystem::path& path, const std::function<void(const ByteSink&)>& produce);

}  // namespace violin
