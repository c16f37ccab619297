// Weights and tensor files for tests of the command, which do without torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace violin {

inline std::string golden_file(const std::string& name) {
  return std::string(VIOLIN_GOLDEN_DIR) + "/" + name;
}

struct FloatTensor {
  std::vector<std::int64_t> shape;
  std::vector<float> values;
};

struct FloatFile {
  std::map<std::string, FloatTensor> tensors;
  nlohmann::json metadata;
};

// A safetensors file of float32 tensors.
inline FloatFile read_floats(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  if (bytes.size() < 8) throw std::runtime_error(path + " is no safetensors file");
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  const nlohmann::json header = nlohmann::json::parse(bytes.substr(8, length));
  FloatFile file;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      file.metadata = entry;
      continue;
    }
    if (entry["dtype"] != "F32") throw std::runtime_error(name + " is not float32");
    FloatTensor tensor;
    tensor.shape = entry["shape"].get<std::vector<std::int64_t>>();
    const std::size_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
    tensor.values.resize((end - begin) / sizeof(float));
    std::memcpy(tensor.values.data(), bytes.data() + 8 + length + begin, end - begin);
    file.tensors[name] = std::move(tensor);
  }
  return file;
}

inline void write_floats(const std::string& path, const std::map<std::string, FloatTensor>& tensors) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    const std::size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(tensor.values.data()), tensor.values.size() * sizeof(float));
    header[name] = {{"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  const std::uint64_t length = text.size();
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(&length), sizeof length);
  out << text << data;
}

// Largest difference over the largest expected magnitude.
inline double relative_error(const FloatTensor& got, const FloatTensor& expected) {
  if (got.shape != expected.shape) return 1e30;
  double difference = 0, largest = 1e-30;
  for (std::size_t i = 0; i < expected.values.size(); ++i) {
    difference = std::max<double>(difference, std::abs(got.values[i] - expected.values[i]));
    largest = std::max<double>(largest, std::abs(expected.values[i]));
  }
  return difference / largest;
}

}  // namespace violin
